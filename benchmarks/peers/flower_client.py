"""Flower's client. It is a module of its own, so that Ray imports it instead of pickling it into each message."""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from jobs import Job, load
from run_bare import train
from torch import nn

app = ClientApp()


@cache
def at_hand(path: str) -> tuple[Job, nn.Module]:
    """The job and one network, kept in the worker between messages."""
    torch.set_num_threads(1)
    job = load(path)
    return job, job.network().train()


@app.train()
def trained(message: Message, context: Context) -> Message:
    """Train the client that the message names, from the weights that it brings."""
    config = message.content["config"]
    job, model = at_hand(config["job"])
    train(model, job, config["client"], message.content["arrays"].to_torch_state_dict())
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": job.settings.samples}),
    }
    return Message(content=RecordDict(content), reply_to=message)
