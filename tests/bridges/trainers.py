"""Small models, data and Trainers for the tests of the bridges; also run as a script, to be killed or in two processes."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

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
    return (kind or Trainer)(model=model, args=args, train_dataset=data, eval_dataset=data)


def moments(trainer):
    """Second moments by live name."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {names[id(p)]: s["exp_avg_sq"].clone() for p, s in optimizer.state.items()}


def ewc_of(model, strength=10.0):
    """An EWC whose first task lies a little beside the present weights."""
    import squisher

    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    held = {n: torch.full_like(p, 1e-2) for n, p in model.named_parameters() if p.requires_grad}
    names = {p.live_name: p.name for p in squisher.tensors.live_parameters(model)}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    ewc = squisher.EWC(model, strength)
    ewc.consolidate(squisher.Importance({names[n]: t for n, t in held.items()}, kind="fisher", unit="example"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(now[n])
    return ewc


def main(job: dict) -> None:
    """One training as a process of its own."""
    import squisher.tensors  # noqa: F401
    from squisher.bridges.transformers import EWCCallback, SquisherCallback

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
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    statuses = []
    for job in jobs:
        world = job.get("processes", 1)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        ranks = [{"RANK": str(k), "LOCAL_RANK": str(k), **place} if world > 1 else {} for k in range(world)]
        children = [fork(job, **rank) for rank in ranks]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        statuses.append(next((status for status in ended if status), 0))
    return statuses


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps(run_all(json.loads(sys.argv[1]))))
