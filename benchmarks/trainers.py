# SPDX-License-Identifier: Apache-2.0
"""Memory of training scripts: how many copies of the model a trainer's process takes, with and without the package.

    python -m benchmarks.trainers --mib 256

Each script receives the model, loads it, changes it and returns it, for two rounds, in the client's job process and in
an external process. A frozen model has no gradients to speak of. Lightning, and transformers with PEFT, are measured if
they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.fl_job import MIB, FLJob, run_in_simulator
from benchmarks.machine import describe_machine

_TENSOR_MIB = 16


@dataclass(frozen=True)
class Case:
    """One kind of script; `trainer` chooses it in `ordinary_trainers`."""

    name: str
    trainer: str
    packages: tuple[str, ...] = ()
    exchange: str = "pytorch"
    executor: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("plain PyTorch", "plain"),
    Case("plain PyTorch, NumPy exchange", "plain", exchange="numpy", executor={"params_exchange_format": "pytorch"}),
    Case("plain PyTorch, difference by the Client API", "difference", executor={"params_transfer_type": "DIFF"}),
    Case("Lightning", "lightning", ("lightning",)),
    Case("Hugging Face Trainer, full model", "hugging face", ("transformers", "peft", "accelerate")),
    Case("Hugging Face Trainer, LoRA", "lora", ("transformers", "peft", "accelerate")),
)


@dataclass(frozen=True)
class Measurement:
    """Bytes of memory before the script makes its model, and at most; and the model's bytes."""

    idle: int
    peak: int
    model: int

    @property
    def copies(self) -> float:
        return (self.peak - self.idle) / self.model


def measure(case: Case, mib: int, *, external: bool, package: bool) -> Measurement:
    """Run one job with one client.

    Raises:
        RuntimeError: The job failed.
    """
    directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-bench-"))
    try:
        witness = directory / "peak.json"
        environment = {"TRAINER": case.trainer, "PEAK": str(witness), "HF_HUB_OFFLINE": "1"}
        persistor, model_bytes = {}, mib * MIB
        if "transformers" in case.packages:
            model_bytes = _write_model(directory, mib)
            environment |= {"BASE": str(directory / "base"), "ADAPTER": str(directory / "adapter")}
            source = directory / ("adapter" if case.trainer == "lora" else "base")
            persistor = {"source_ckpt_file_full_name": str(source)}
        job = FLJob(
            mode="level-3" if package else "level-2",
            clients=1,
            model_mib=mib,
            tensors=mib // _TENSOR_MIB,
            external=external,
            exchange=case.exchange,
            executor=case.executor,
            persistor=persistor,
            trainer=Path(__file__).parent / "fl_job" / "ordinary_trainers.py",
        )
        environment["SIZES"] = json.dumps([job.tensors, job.elements])
        result = run_in_simulator(job, directory, environment=environment)
        if not result.ok or not witness.exists() or "Finished FedAvg" not in result.server_log:
            raise RuntimeError(f"{case.name}: the job failed:\n{result.output[-6000:]}")
        found = json.loads(witness.read_text())
        return Measurement(found["idle"], found["peak"], model_bytes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_model(directory: Path, mib: int) -> int:
    """Write a model and an adapter as Hugging Face directories, and return the bytes of the model."""
    import peft
    import torch
    import transformers

    layers = max(1, round((mib - 2) / 24))
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory / "base")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], base_model_name_or_path=str(directory / "base"))
    peft.get_peft_model(model, lora).save_pretrained(directory / "adapter")
    return nbytes


def rows(mib: int, chosen: str) -> Iterator[str]:
    """Yield the lines of the table, as they are measured."""
    yield "| script | where | without the package | with it |"
    yield "|---|---|---:|---:|"
    for case in CASES:
        missing = [name for name in case.packages if find_spec(name) is None]
        if chosen not in case.name or missing:
            continue
        for external in (False, True):
            without, with_it = (measure(case, mib, external=external, package=package) for package in (False, True))
            yield (
                f"| {case.name} | {'external' if external else 'in process'} "
                + " ".join(f"| {m.copies:.1f} (idle {m.idle / MIB:.0f} MiB)" for m in (without, with_it))
                + " |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--only", default="", help="part of a script's name in the table")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, text in describe_machine().items():
        print(f"- {name}: {text}")
    print(f"\nPeak of RssAnon in copies of a model of {options.mib} MiB, beyond the idle process:\n")
    for line in rows(options.mib, options.only):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
