"""Small models, data and Trainers for the tests of the bridges; also run as a script, to be killed or in two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


class Tokens(Dataset):
    """Rows of ten tokens; the labels of some positions are left out, differently in every row."""

    def __init__(self, classes: int = 0, size: int = 64) -> None:
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, 60, (size, 10), generator=g)
        self.labels = torch.randint(0, classes, (size,), generator=g) if classes else self.ids.clone()
        if not classes:
            self.labels[torch.rand(size, 10, generator=g) < 0.3] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[k], "labels": self.labels[k]}


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **more))


def bert(classes=3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(num_labels=classes, **SIZES, **none))


def lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def trainer(model, folder, data=None, kind=None, **more):
    from transformers import Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    settings = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "lr_scheduler_type": "constant",
    }
    args = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **{**settings, **more}
    )
    data = Tokens() if data is None else data
    made = (kind or Trainer)(model=model, args=args, train_dataset=data, eval_dataset=data)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves it set, for the next test as well
    return made


def moments(trainer):
    """Second moments by live name."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {names[id(p)]: s["exp_avg_sq"].clone() for p, s in optimizer.state.items()}


def ewc_of(model, strength=10.0):
    """An EWC whose first task lies a little beside the present weights."""
    import squisher
    from squisher.names import live_parameters

    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    held = {n: torch.full_like(p, 1e-2) for n, p in model.named_parameters() if p.requires_grad}
    names = {p.live_name: p.name for p in live_parameters(model)}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    ewc = squisher.EWC(model, strength)
    ewc.consolidate(squisher.Importance({names[n]: t for n, t in held.items()}, kind="fisher", unit="example"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(now[n])
    return ewc


class Rows(Dataset):
    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[k], self.y[k]


def net(pl, optimizer=torch.optim.AdamW, lr=1e-2):
    """A small LightningModule."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

        def training_step(self, batch, index):
            x, y = batch
            return torch.nn.functional.cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=lr)

    return Net()


def lightning_main(job: dict) -> None:
    """One training with Lightning, in one or two processes."""
    import lightning.pytorch as pl

    from squisher.integrations.lightning import EWCCallback, SquisherCallback

    module, file = net(pl), Path(job["folder"]) / "squisher.safetensors"
    callback = EWCCallback(ewc_of(module), file) if job.get("ewc") else SquisherCallback(file)
    run = pl.Trainer(
        accelerator="cpu", devices=job["devices"], strategy=job["strategy"], max_epochs=1, accumulate_grad_batches=2,
        callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=job["folder"], use_distributed_sampler=False,
    )  # fmt: skip
    rank = int(os.environ.get("RANK", 0))  # Lightning's own sampler would shuffle
    sampler = torch.utils.data.DistributedSampler(Rows(), job["devices"], rank, shuffle=False)
    run.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=job["batch"], sampler=sampler))


def main(job: dict) -> None:
    """One training as a process of its own."""
    if job.get("lightning"):
        return lightning_main(job)
    import squisher.storage.tensors  # noqa: F401
    from squisher.integrations.transformers import EWCCallback, SquisherCallback

    model = {"llama": llama, "bert": bert}[job.get("model", "llama")]()
    data = Tokens(3 if job.get("model") == "bert" else 0, job.get("size", 64))
    if job.get("lora"):
        model = lora(model)
    run = trainer(model, job["folder"], data, **job.get("args", {}))
    if job.get("ewc"):
        EWCCallback(ewc_of(run.model)).attach(run)
    else:
        SquisherCallback(track=job.get("track", False)).attach(run)
    if job.get("die_at"):

        class Dies:
            def __getattr__(self, name):
                return lambda *_, **__: None

            def on_step_end(self, args, state, control, **_):
                if state.global_step == job["die_at"]:
                    os.kill(os.getpid(), 9)

        run.add_callback(Dies())
    run.train(resume_from_checkpoint=job.get("resume"))
    if run.args.should_save:
        weights = {n: p.detach() for n, p in run.model.named_parameters()}
        torch.save({"weights": weights, "moments": moments(run)}, Path(job["folder"]) / "end.pt")


def fork(job: dict, **env: str) -> int:
    """Runs a job in a child that has everything imported already; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(env)
        main(job)
        status = 0
    finally:
        os._exit(status)


def run_all(jobs: list[dict]) -> list[int]:
    """Runs jobs one after the other, each in one or more processes; their worst exit status, or minus a signal."""
    # Everything that children would import one by one is imported once.
    if any(job.get("lightning") for job in jobs):
        import lightning.pytorch  # noqa: F401

        import squisher.integrations.lightning
    else:
        import deepspeed  # noqa: F401
        import transformers.trainer  # noqa: F401

        import squisher.integrations.transformers  # noqa: F401

        bert(), lora(llama())
    statuses = []
    for job in jobs:
        world = job.get("processes", 1)
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": "0",
        }
        ranks = [
            {"RANK": str(k), "LOCAL_RANK": str(k), "GROUP_RANK": "0", **place} if world > 1 else {}
            for k in range(world)
        ]
        children = [fork(job, **rank) for rank in ranks]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        statuses.append(next((status for status in ended if status), 0))
    return statuses


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def in_processes(jobs: list[dict], root: Path) -> tuple[list[int], str]:
    """Runs jobs in a new process and its children; their exit statuses, and what went to standard error."""
    command = [sys.executable, "-m", "tests.integrations.trainers", json.dumps(jobs), str(root / "statuses.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((root / "statuses.json").read_text()), done.stderr[-5000:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps(run_all(json.loads(sys.argv[1]))))
