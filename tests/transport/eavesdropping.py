# SPDX-License-Identifier: Apache-2.0
"""Keys for cells that encrypt, and an eavesdropper on the messages between cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.transport.peers import State


def credentials(folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Make a certificate for each name as NVFlare's provisioning does; the first is the server's."""
    from nvflare.fuel.f3.drivers.driver_params import DriverParams
    from nvflare.lighter import utils

    authority = utils.Identity("authority")
    signing_key, its_public_key = utils.generate_keys()
    certificate = utils.generate_cert(authority, authority, signing_key, its_public_key, ca=True)
    (folder / "ca.pem").write_bytes(utils.serialize_cert(certificate))
    made = {}
    for name in names:
        key, public_key = utils.generate_keys()
        subject = utils.Identity(name.replace("_", "-"))
        certificate = utils.generate_cert(subject, authority, signing_key, public_key)
        (folder / f"{name}.pem").write_bytes(utils.serialize_cert(certificate))
        (folder / f"{name}.key").write_bytes(utils.serialize_pri_key(key))
        kind = "SERVER" if name == names[0] else "CLIENT"
        made[name] = {
            DriverParams.CA_CERT.value: str(folder / "ca.pem"),
            DriverParams[f"{kind}_CERT"].value: str(folder / f"{name}.pem"),
            DriverParams[f"{kind}_KEY"].value: str(folder / f"{name}.key"),
            # The line itself is not encrypted, so that one can listen: messages are, from end to end.
            DriverParams.CONNECTION_SECURITY.value: "clear",
        }
    return made


def listen(state: State) -> None:
    """Record the topic and the content of each frame that arrives here afterwards."""
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager

    heard = state.kept["heard"] = []
    process = ConnManager.process_frame_task

    def note(self: ConnManager, connection: Any, frame: Any) -> None:
        heard.append(bytes(frame))
        process(self, connection, frame)

    ConnManager.process_frame_task = note


def heard(state: State, secret: bytes) -> dict[str, int]:
    """How many frames of segments came, how many were readable, how often the secret was in any; how many receipts."""
    import msgpack
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

    from nvflare_lazy.transport.segments import protocol

    counted = {"segments": 0, "in the clear": 0, "secrets": 0}
    receipts = set()
    for frame in state.kept["heard"]:
        counted["secrets"] += secret in frame
        prefix = Prefix.from_bytes(frame)
        if not prefix.header_len:
            continue
        headers = msgpack.unpackb(frame[PREFIX_LEN : PREFIX_LEN + prefix.header_len])
        if headers.get(MessageHeaderKey.TOPIC) == protocol.DATA_TOPIC:
            counted["segments"] += 1
            counted["in the clear"] += not headers.get(MessageHeaderKey.ENCRYPTED, False)
            receipts.add(headers[protocol.KEY]["receipt"])
    state.kept["heard"].clear()
    return counted | {"receipts": len(receipts)}


def secret_model(state: State, secret: bytes) -> None:
    """Make a model that contains a text repeatedly."""
    import torch

    size = 4 << 20
    state.kept["model"] = {
        f"layer.{i}": torch.frombuffer(bytearray((secret * (size // len(secret) + 1))[:size]), dtype=torch.uint8)
        for i in range(3)
    }


def is_secret_model(state: State, secret: bytes) -> bool:
    """Whether the last payload is that model."""
    received = state.payloads[-1]["model"]
    size = 4 << 20
    expected = (secret * (size // len(secret) + 1))[:size]
    return len(received) == 3 and all(bytes(tensor.numpy()) == expected for tensor in received.values())


def read_one(state: State, secret: bytes) -> bool:
    """Whether one tensor of a payload of references, read alone, has the expected content."""
    got = bytes(state.payloads[-1]["model"]["layer.1"].materialize().numpy())
    return got.startswith(secret) and len(got) == 4 << 20
