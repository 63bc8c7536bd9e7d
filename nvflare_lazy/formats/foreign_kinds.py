# SPDX-License-Identifier: Apache-2.0
"""What a file is when it is no checkpoint that can be opened, and what to do about it.

Downloads fail in a few well-known ways, and what they leave is called `model.safetensors` all the same. Said at once
by `open`, this saves the time of finding it out.
"""

from __future__ import annotations

import codecs
import re

# What the beginning of a file gives away, and what to say then.
_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned, or download the file",
    ),
    (b"/annex/objects/", "a git-annex pointer, not the file itself: run `git annex get` on it"),
    (b"\x1f\x8b", "gzip data: decompress it first (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data: decompress it first (unzstd)"),
    (b"\xfd7zXZ\x00", "xz data: decompress it first (unxz)"),
    (b"BZh", "bzip2 data: decompress it first (bunzip2)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive: unpack it first"),
    (b"\x93NUMPY", "a NumPy .npy array: load it with np.load and save() it under a name"),
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file (Keras, or TensorFlow): load it there, and save() its weights under their names",
    ),
    (b"GGUF", "a GGUF file (llama.cpp): convert it back with the tools of the `gguf` package"),
    (b"tjgg", "a GGML file (old llama.cpp): convert it with the tools of llama.cpp"),
    (b"lmgg", "a GGML file (old llama.cpp): convert it with the tools of llama.cpp"),
    (b"PAR1", "a Parquet file: a table, not a checkpoint"),
    (b"ARROW1", "an Arrow file: a table, not a checkpoint"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program or library"),
    (b"SQLite format 3\x00", "an SQLite database"),
)
_MARKUP = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:!--|!doctype\s+html|html|head|body|script|title)", re.IGNORECASE)
_XML_ERROR = re.compile(rb"\s*(?:<\?xml[^>]*>)?\s*<Error>\s*<Code>(\w+)", re.IGNORECASE)
_XML = re.compile(rb"\s*<\?xml")
_JSON = re.compile(rb"\s*[\[{]\s*(?:[\[{\"\]}\d-]|true|false|null)")
_PICKLE = re.compile(rb"\x80[\x01-\x05]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_ONNX = re.compile(rb"\x08[\x01-\x10]\x12.(?:pytorch|onnx|tf2onnx|skl2onnx|keras2onnx)", re.DOTALL)


def describe_foreign(head: bytes, size: int) -> str:
    """Say what a file looks like, and what to do with it.

    Args:
        head: The beginning of it, 512 bytes if it has as many.
        size: How many bytes it has.
    """
    if size == 0:
        return "an empty file: the download or save that made it never finished"
    for beginning, what in _BEGINNINGS:
        if head.startswith(beginning):
            return what
    if _MARKUP.match(head):
        return (
            "an HTML page: the download brought a login or error page instead of the file; "
            "look at it in a browser, and check the address and whether you need a token"
        )
    refused = _XML_ERROR.match(head)
    if refused:
        return f"an error message of a storage service ({refused[1].decode()}): check the address and your credentials"
    if _XML.match(head):
        return "an XML document"
    if is_npz(head):
        return "a NumPy .npz archive: load it with np.load and save() its arrays"
    if _PICKLE.match(head):
        return "a Python pickle that torch.save did not write: load it where you trust it, and save() its tensors"
    if _ONNX.match(head):
        return "an ONNX model: its weights have to be exported from there"
    if not any(head):
        return "zero bytes: a download that reserved its space and was never filled; fetch it again"
    if _JSON.match(head):
        return "JSON, and not the index of a sharded checkpoint: the answer of a server, or a configuration file"
    if _is_text(head):
        return f"text that begins with {head[:60].decode('utf-8', 'replace')!r}"
    return f"data of an unknown kind that begins with the bytes {head[:16].hex(' ')}"


def is_npz(head: bytes | bytearray) -> bool:
    """Whether a file is a zip archive that begins with a NumPy array."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + length].endswith(b".npy")


def _is_text(head: bytes) -> bool:
    try:
        # Not final: the last character may be cut in two.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not _CONTROL.search(text)
