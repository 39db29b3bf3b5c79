"""FedMix with FedProx in a Flower app with your own model, data and training loop."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedblend.flower import Inputs, Strategy, add_sharing, blend_mod, blended_loss

INPUTS = Inputs(shape=(64,), outputs=10)  # fedblend: shape of an input, number of classes
server_app = ServerApp()
client_app = ClientApp(mods=[blend_mod])  # fedblend


def network() -> torch.nn.Module:
    """Your model: from an image of 8 x 8 pixels to logits of ten digits."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def samples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: this client's inputs [n, 64] and labels [n]."""
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    mine = y.argsort(stable=True).tensor_split(parts)[part]  # few labels at each client
    return x[mine].float() / 16, y[mine]


add_sharing(client_app, INPUTS, samples)  # fedblend: FedMix's means, before the first round


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Your training: one epoch from the round's weights."""
    model, (x, y) = network(), samples(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = blended_loss(context, model, INPUTS)  # fedblend: in place of a loss of your own
    for rows in torch.randperm(len(y)).split(10):
        optimizer.zero_grad()
        loss_of(x[rows], y[rows]).backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Your federation: the rounds of a strategy, then the accuracy of the model."""
    config, model = context.run_config, network()
    strategy = Strategy(FedAvg(fraction_evaluate=0.0), config["method"], INPUTS, model=model, lr=0.1)  # fedblend
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=config["rounds"])
    model.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    print(f"accuracy {float((model(x.float() / 16).argmax(1) == y).float().mean()):.4f}")
