# SPDX-License-Identifier: Apache-2.0
"""Training scripts as users write them, which measure the memory of their process: plain, Lightning and Hugging Face.

Almost all parameters are frozen, so gradients and the optimizer take next to nothing and each copy of the model shows.
This file travels in the job's `custom` folder; `TRAINER` in the environment chooses the script.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")


class Peak(threading.Thread):
    """Watches the memory of this process from the moment before the model is made."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.idle = self.most = anonymous()
        self._end = threading.Event()

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        while not self._end.wait(0.003):
            self.most = max(self.most, anonymous())
            # NVFlare ends external trainers, so the last sample counts.
            Path(os.environ["PEAK"]).write_text(json.dumps({"idle": self.idle, "peak": self.most}))


def freeze_all_but_last(model) -> None:
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(False)
    list(model.parameters())[-1].requires_grad_(True)


def plain() -> None:
    import nvflare.client as flare
    import synthetic_model

    flare.init()
    with Peak():
        model = synthetic_model.SyntheticModel(*json.loads(os.environ["SIZES"]))
        while flare.is_running():
            received = flare.receive()
            if received is None:
                break
            model.load_state_dict(received.params)
            if os.environ["TRAINER"] != "difference":
                # The Client API needs them to compute a difference.
                received.params = None
            for parameter in model.parameters():
                parameter.mul_(1.01)
            flare.send(flare.FLModel(params=model.state_dict()))


def lightning() -> None:
    import nvflare.client.lightning as flare
    import synthetic_model
    import torch
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = synthetic_model.SyntheticModel(*json.loads(os.environ["SIZES"]))
            freeze_all_but_last(self)

        def state_dict(self, *args, **kwargs):
            return self.model.state_dict(*args, **kwargs)

        def load_state_dict(self, state_dict, strict=True, assign=False):
            return self.model.load_state_dict(state_dict, strict, assign)

        def training_step(self, batch, _):
            return list(self.parameters())[-1][:8].sum() * batch.sum()

        def configure_optimizers(self):
            return torch.optim.SGD([list(self.parameters())[-1]], lr=1e-3)

    with Peak():
        module = Module()
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        flare.patch(trainer)
        data = torch.utils.data.DataLoader(torch.ones(2, 1))
        while flare.is_running():
            trainer.fit(module, data)


def hugging_face() -> None:
    import nvflare.client.hf as flare
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    with Peak(), tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_pretrained(os.environ["BASE"])
        if os.environ["TRAINER"] == "lora":
            model = PeftModel.from_pretrained(model, os.environ["ADAPTER"], is_trainable=True)
        else:
            freeze_all_but_last(model)
        row = torch.arange(6)
        arguments = TrainingArguments(
            directory,
            max_steps=1,
            learning_rate=1e-3,
            optim="sgd",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 8)
        flare.patch(trainer, restore_state=False, local_steps=1)
        while flare.is_running():
            trainer.train()


def main() -> None:
    if "--install" in sys.argv:
        import nvflare_lazy

        nvflare_lazy.install()
    scripts = {"lightning": lightning, "hugging face": hugging_face, "lora": hugging_face}
    scripts.get(os.environ["TRAINER"], plain)()


if __name__ == "__main__":
    main()
