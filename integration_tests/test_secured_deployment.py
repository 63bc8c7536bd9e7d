# SPDX-License-Identifier: Apache-2.0
"""A provisioned deployment with mutual TLS: permitted connections, and a second process of a site.

These are NVFlare's defenses. The tests state what docs/security.md says about them, and that a job here relies on them.
"""

from __future__ import annotations

import datetime
import json
import shutil
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import nvflare_lazy
from benchmarks.fl_job import FLJob
from benchmarks.fl_job.poc import Deployment, run_in_poc
from integration_tests.conftest import in_deployment, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps
from integration_tests.test_attacks import AttackedJob, failures


def self_signed_certificate(directory: Path) -> Path:
    """Write a certificate named site-1 that no authority has signed, with its key, and return its path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "site-1")])
    issued = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    now = datetime.datetime.now(datetime.timezone.utc)
    issued = issued.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    signed = issued.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    path = directory / "self-signed.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


def connects(deployment: Deployment, certificate: Path | None, key: Path | None = None) -> bool:
    """Whether the server answers a TLS connection with this certificate."""
    startup = deployment.kits / "site-1" / "startup"
    target = json.loads((startup / "fed_client.json").read_text())["servers"][0]["service"]["target"]
    host, port = target.rsplit(":", 1)
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    try:
        plain = socket.create_connection((host, int(port)), timeout=30)
        with plain, context.wrap_socket(plain, server_hostname=host) as secure:
            # With TLS 1.3 the handshake ends for the client before the server has verified its certificate.
            secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return bool(secure.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


@in_deployment
@pytest.mark.slow
def test_a_job_over_mutual_tls(tmp_path: Path):
    """Only certificates of the project connect; a job with external trainers is right, and leaves no scratch."""
    probes: dict[str, bool] = {}

    def probe(deployment: Deployment, _: str) -> None:
        if not probes:
            startup = deployment.kits / "site-1" / "startup"
            probes["none"] = connects(deployment, None)
            probes["self-signed"] = connects(deployment, self_signed_certificate(tmp_path))
            probes["site-1"] = connects(deployment, startup / "client.crt", startup / "client.key")

    job = FLJob(mode="level-3", model_mib=1, tensors=4, rounds=2, external=True)
    result = run_in_poc(job, tmp_path, during=probe)
    assert result.ok, result.output[-3000:]
    assert probes == {"none": False, "self-signed": False, "site-1": True}
    assert [record["aggregated"] for record in records(result, "round")] == [["site-1", "site-2"]] * 2
    value = next_global(start(1, job.elements), [1, 2]).astype("float32")
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00001"].numpy(), next_global(value, [1, 2])) <= 1
    assert not left_in(tmp_path / "scratch")


@in_deployment
@pytest.mark.slow
def test_messages_in_another_clients_name(tmp_path: Path):
    """NVFlare drops messages with another client's origin, name or token; claims in their content change nothing."""
    notes = tmp_path / "notes"
    notes.mkdir()
    attacks = [
        "another_clients_name_in_the_message",
        "messages_in_another_clients_name",
        "results_of_other_tasks",
        "the_result_twice",
    ]
    job = AttackedJob.of("deployment", attacks)
    result = run_in_poc(job, tmp_path, environment={"ATTACK_NOTES": str(notes)}, timeout=300)
    assert result.ok, result.output[-3000:]
    assert failures(result, notes) == {}
    for reason in ("invalid auth token signature", "is bound to origin"):
        assert reason in result.output
    assert not left_in(tmp_path / "scratch")


@in_deployment
@pytest.mark.slow
def test_a_second_process_of_a_site(tmp_path: Path):
    """Started from a copy of site-2's kit during a job: the rounds have the results of both sites, and no other.

    NVFlare authenticates the copy, which has the site's key, and gives it the site's connection, again and again, as
    the processes take turns to reconnect. It may call the job failed at the end, since the copy does not run the job.
    """
    copied: list[str] = []

    def start_a_copy(deployment: Deployment, job_id: str) -> None:
        log = deployment.kits / "localhost" / job_id / "log.txt"
        if not copied and log.exists() and "Round 0: received the result" in log.read_text():
            copied.append("site-2-copy")
            shutil.copytree(deployment.kits / "site-2", deployment.kits / copied[0])
            deployment.start(copied[0])

    job = FLJob(mode="level-2", model_mib=1, tensors=4, rounds=20)
    result = run_in_poc(job, tmp_path, during=start_a_copy, timeout=200)
    assert "Successfully registered client:site-2" in (tmp_path / "site-2-copy.txt").read_text()
    assert "is evicted for" in result.output
    rounds = records(result, "round")
    assert rounds
    value = start(1, job.elements)
    for record in rounds:
        assert record["aggregated"] == ["site-1", "site-2"]
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00001"].numpy(), exact) <= 1
    assert not left_in(tmp_path / "scratch")
