# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.fl_job`: run the job once for each mode and print its time and memory."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.fl_job import MODES, FLJob, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fl_job", description=__doc__)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["stock", "level-2"])
    parser.add_argument("--env", choices=("sim", "poc"), default="sim")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--model-mib", type=float, default=256)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exchange", choices=("pytorch", "numpy"), default="pytorch")
    parser.add_argument("--difference", action="store_true")
    parser.add_argument("--external", action="store_true")
    parser.add_argument("--apart", action="store_true", help="give the server of a deployment its own scratch root")
    parser.add_argument("--json", type=Path, help="folder for one JSON file of samples for each mode")
    parser.add_argument("--keep", type=Path, help="keep the job, the workspace and the logs below this folder")
    options = parser.parse_args()
    for mode in options.mode:
        job = FLJob(
            mode=mode,
            clients=options.clients,
            model_mib=options.model_mib,
            tensors=options.tensors,
            rounds=options.rounds,
            dtype=options.dtype,
            exchange=options.exchange,
            difference=options.difference,
            external=options.external,
        )
        directory = Path(tempfile.mkdtemp(prefix=f"fl_job_{mode}_", dir=options.keep))
        try:
            arguments = {"server_scratch": directory / "server-scratch"} if options.apart else {}
            result = run(job, directory, env=options.env, **arguments)
            print(json.dumps(result.summary()), flush=True)
            if not result.ok:
                print(result.output[-3000:])
            if options.json:
                options.json.mkdir(parents=True, exist_ok=True)
                (options.json / f"{mode}.json").write_text(result.to_json())
        finally:
            if not options.keep:
                shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
