# SPDX-License-Identifier: Apache-2.0
"""URLs are taken apart as their schemes define, and messages never contain their secrets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry

from nvflare_lazy.errors import MissingPackageError, RemoteError
from nvflare_lazy.remote import url as urls


@pytest.mark.parametrize("path", ["s3://bucket/key", "https://host/a", "memory://x", "hf://org/repo", "HTTP://host/a"])
def test_urls(path):
    assert urls.is_url(path)


@pytest.mark.parametrize(
    "path", ["model.safetensors", "/a/b", "c:/model.pt", "c://model.pt", "", "a:b", Path("s3://x/y"), 7]
)
def test_paths(path):
    assert not urls.is_url(path)


@pytest.mark.parametrize(
    ("directory", "name", "expected"),
    [
        ("s3://bucket/a", "m.safetensors", "s3://bucket/a/m.safetensors"),
        ("s3://bucket/a/", "50%?#.pt", "s3://bucket/a/50%?#.pt"),
        ("https://host/a/?key=secret", "50%?#.pt", "https://host/a/50%25%3F%23.pt?key=secret"),
        ("hf://org/repo@main", "m.safetensors", "hf://org/repo@main/m.safetensors"),
    ],
)
def test_children(directory, name, expected):
    made = urls.child(directory, name)
    assert made == expected
    assert urls.basename(made) == name
    assert urls.child(urls.parent(made), name) == made


def test_suffix():
    assert urls.with_suffix("https://host/m?a=b", ".index.json") == "https://host/m.index.json?a=b"
    assert urls.with_suffix("s3://b/m", ".index.json") == "s3://b/m.index.json"


def test_secrets_are_not_displayed():
    assert urls.display("https://me:pass@host/m.pt?X-Amz-Signature=abc") == "https://host/m.pt"
    assert urls.display("sftp://me:pass@host/m.pt") == "sftp://me@host/m.pt"
    assert urls.display("hf://org/repo@refs%2Fpr%2F1/m") == "hf://org/repo@refs%2Fpr%2F1/m"
    text = "403, message='Forbidden', url='https://me:pass@host/m.pt?sig=abc', see https://host"
    assert urls.redact(text) == "403, message='Forbidden', url='https://host/m.pt', see https://host"


def test_unknown_schemes():
    with pytest.raises(RemoteError, match="nonsense://x/y: Protocol not known"):
        urls.filesystem("nonsense://x/y")
    with pytest.raises(RemoteError, match="is not the URL of a file"):
        urls.filesystem("zip://a::https://host/b.zip")


@pytest.mark.parametrize(("url", "module", "package"), [("gs://b/m", "gcsfs", "gcsfs"), ("s3://b/m", "s3fs", "remote")])
def test_missing_packages(url, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    # An earlier test may have used it.
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    with pytest.raises(MissingPackageError, match=f"run: pip install .*{package}"):
        urls.filesystem(url)
