"""fedblend's methods in a Flower app of the user's own: what is sent, what is lost, what the aggregate becomes."""

from __future__ import annotations

import copy
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import Nodes
from flower_sites import audit, site_files
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.object_ref import validate
from helpers import each, same_up_to_rounding
from script_helpers import script
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import StepPlan
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.server_step import ModelSpec, ServerContext
from fedblend.core.sharing import Pool
from fedblend.experiment import presets
from fedblend.flower import site as site_policy
from fedblend.flower.app.blending import BlendedLoss, add_sharing, blend_mod, blended_loss
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app.strategy import Strategy
from fedblend.flower.app.supported import supported_method
from fedblend.flower.ledger import SharingLedger
from fedblend.flower.messages import SHARE_QUERY, attach
from fedblend.methods.augment.augmix import augmix

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
INPUTS = Inputs(shape=(5,), outputs=3)
LR = 0.1


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def samples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(client)
    n = 4 + 2 * client
    return torch.from_numpy(rng.random((n, 5), np.float32)), torch.from_numpy(rng.integers(3, size=n))


def client_of(context: Context) -> int:
    return context.node_config["partition-id"]


class App:
    """A user's app: two batches of SGD, with fedblend's loss; what the training function saw is kept."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[str]]] = []
        self.losses: list[Any] = []
        self.app = ClientApp(mods=[blend_mod])
        add_sharing(self.app, INPUTS, lambda context: samples(client_of(context)))
        self.app.train()(self.train)

    def train(self, message: Message, context: Context) -> Message:
        self.seen.append((client_of(context), sorted(message.content)))
        model, (x, y) = network(), samples(client_of(context))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        loss_of = blended_loss(context, model, INPUTS)
        self.losses.append(loss_of)
        for rows in torch.arange(len(y)).split(-(-len(y) // 2)):
            optimizer.zero_grad()
            loss_of(x[rows], y[rows]).backward()
            optimizer.step()
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(RecordDict(answer), reply_to=message)


def grid_of(clients: int = 3, app: App | None = None, **config: Any) -> Nodes:
    return Nodes(({"partition-id": client, **config} for client in range(clients)), app=(app or App()).app)


def start(
    method: Any, grid: Nodes, rounds: int = 2, inner: FedAvg | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    strategy = Strategy(inner or FedAvg(fraction_evaluate=0.0), method, INPUTS, **options)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
    return result.arrays.to_torch_state_dict()


def by_hand(rounds: int, loss: Any, clients: int = 3) -> dict[str, torch.Tensor]:
    """Averages of :class:`App`'s loop in plain PyTorch, with ``loss(model, begin, x, y, client, round, step)``."""
    weights = network().state_dict()
    for round in range(rounds):
        sums, total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in weights.items()}, 0
        for client in range(clients):
            model = network()
            model.load_state_dict(weights)
            begin = copy.deepcopy(model)
            x, y = samples(client)
            for step, rows in enumerate(torch.arange(len(y)).split(-(-len(y) // 2))):
                model.zero_grad()
                loss(model, begin, x[rows], y[rows], client, round, step).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= LR * p.grad
            for name, t in model.state_dict().items():
                sums[name] += len(y) * t.double()
            total += len(y)
        weights = {name: (t / total).float() for name, t in sums.items()}
    return weights


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    same_up_to_rounding(one, other, steps=100)


def test_fedavg_equals_the_wrapped_strategy_alone() -> None:
    close(start("fedavg", grid_of()), by_hand(2, lambda model, begin, x, y, *_: F.cross_entropy(model(x), y)))


def test_fedprox_is_the_squared_distance_from_the_rounds_weights() -> None:
    def loss(model: nn.Module, begin: nn.Module, x: torch.Tensor, y: torch.Tensor, *_: int) -> torch.Tensor:
        apart = sum(
            (p - q.detach()).square().sum() for p, q in zip(model.parameters(), begin.parameters(), strict=True)
        )
        return F.cross_entropy(model(x), y) + 0.7 / 2 * apart

    close(start({"name": "fedprox", "terms": [{"name": "proximal", "mu": 0.7}]}, grid_of()), by_hand(2, loss))


def test_fedmix_is_equation_5_on_the_means_that_clients_shared() -> None:
    lam = 0.3
    # Node ids fall with the client, and entries are in order of node.
    means = [(x.mean(0), F.one_hot(y, 3).float().mean(0)) for x, y in map(samples, (2, 1, 0))]
    drawn: dict[tuple[int, int], list[int]] = {}
    for client in range(3):
        for round in range(2):
            rng = stream(5, "objective", round, client)
            # One entry a step, and whether it is mixed (always).
            drawn[client, round] = [(int(rng.integers(3, size=(1,))[0]), rng.random(1))[0] for _ in range(2)]

    def loss(
        model: nn.Module, begin: nn.Module, x: torch.Tensor, y: torch.Tensor, client: int, round: int, step: int
    ) -> torch.Tensor:
        x_g, y_g = means[drawn[client, round][step]]
        z = ((1 - lam) * x).requires_grad_()
        out = model(z)
        own = F.cross_entropy(out, y)
        (slope,) = torch.autograd.grad(own, z, create_graph=True)
        other = -(F.log_softmax(out, 1) * y_g).sum(1).mean()
        return (1 - lam) * own + lam * other + lam * (1 - lam) * (slope * x_g).sum()

    made = start({"name": "fedmix", "objective": {"lambda": lam}}, grid_of(), seed=5)
    close(made, by_hand(2, loss))


def test_fed_augmix_augments_on_the_scale_of_inputs() -> None:
    inputs = Inputs(shape=(1, 8, 8), outputs=3, mean=0.4, std=0.2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    unit = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2, 0])
    fields = {"objective": {"name": "augmix", "loss_scaling": False}, "terms": [], "round": 0, "seed": 2, "own": [0, 0]}
    made = BlendedLoss(model, inputs, fields, {}, 9)((unit - 0.4) / 0.2, y)

    part = build("objective", fields["objective"])
    drawn = part.draw(stream(2, "objective", 0, 9), StepPlan(np.array([4]), 4, 0, np.zeros(0, bool), 0))
    views = (augmix(unit, {n: torch.from_numpy(a)[0] for n, a in drawn.items()}) - 0.4) / 0.2
    shares = torch.stack([model((unit - 0.4) / 0.2), model(views[0]), model(views[1])]).double().softmax(-1)
    middle = shares.mean(0)
    divergence = (shares * (shares.log() - middle.log())).sum(-1).mean()
    expected = F.cross_entropy(model((unit - 0.4) / 0.2), y) + 50 * divergence
    torch.testing.assert_close(made.double(), expected.double(), rtol=1e-4, atol=1e-6)


def test_an_app_of_tokens_computes_its_loss_and_mixes_none() -> None:
    model, inputs = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 3)), Inputs(shape=(2,), outputs=3)
    ids, y = torch.tensor([[1, 8], [0, 2]]), torch.tensor([0, 2])
    fields = {"terms": [], "round": 0, "seed": 2, "own": [0, 0]}
    loss = BlendedLoss(model, inputs, {**fields, "objective": {"name": "plain"}}, {}, 0)(ids, y)
    torch.testing.assert_close(loss, F.cross_entropy(model(ids), y))
    with pytest.raises(FedblendError, match=r"'localmix' mixes, .* as ids of tokens"):
        BlendedLoss(model, inputs, {**fields, "objective": {"name": "localmix"}}, {}, 0)(ids, y)


def test_own_means_are_excluded_and_without_others_the_loss_is_plain() -> None:
    method = {"name": "naivemix", "objective": {"exclude_own": True}}
    app, alone = App(), FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    start(method, grid_of(app=app), rounds=1)
    # Node ids fall with the client, and entries are in order of node.
    own = {client: loss.own.tolist() for (client, _), loss in zip(app.seen, app.losses, strict=True)}
    assert own == {0: [False, False, True], 1: [False, True, False], 2: [True, False, False]}
    close(
        start(method, grid_of(1), inner=alone),
        by_hand(2, lambda model, begin, x, y, *_: F.cross_entropy(model(x), y), clients=1),
    )


def test_means_are_sent_once_and_the_training_function_gets_the_wrapped_strategys_message() -> None:
    app = App()
    grid = grid_of(app=app)
    pushed: list[tuple[int, str, list[str]]] = []
    push = grid.push_messages

    def noted(messages: Any) -> list[str]:
        messages = list(messages)
        pushed.extend(
            (grid.client(m.metadata.dst_node_id), m.metadata.message_type, sorted(m.content)) for m in messages
        )
        return push(messages)

    grid.push_messages = noted
    trained: list[int] = []

    def fail(client: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train":
            trained.append(client)
            if trained.count(client) == client + 1 < 3:
                # Its node was restarted, client 0's in round 1 and client 1's in round 2: nothing is remembered there.
                context = next(c for c in grid.contexts.values() if c.node_config["partition-id"] == client)
                context.state = RecordDict()
                return Message(Error(0, "gone"), reply_to=message)
        return reply

    start("fedmix", grid.spoiled(fail), rounds=4)

    assert [kind for _, kind, _ in pushed] == ["query.fedblend_share"] * 3 + ["train"] * 12
    told = [(c, "fedblend-tensors" in names) for c, kind, names in pushed if kind == "train"]
    assert [[c for c, sent in sorted(told[i : i + 3]) if sent] for i in (0, 3, 6, 9)] == [[0, 1, 2], [0], [1], []]
    assert {tuple(names) for _, names in app.seen} == {("arrays", "config")}


def test_a_site_file_applies_in_a_users_own_app(tmp_path: Path) -> None:
    files = [{}, {"allow": ["weights"]}, {"min_mean": 9}, {"rounds": 1, "protection": {"name": "noise", "clip": 1e-3}}]
    grid = Nodes(site_files(tmp_path, 4, dict(enumerate(files))), app=App().app)
    strategy = Strategy(FedAvg(fraction_evaluate=0.0), "fedmix", INPUTS)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)

    kinds = [[(line["kind"], "refused" in line, line["round"]) for line in audit(tmp_path, c)] for c in range(4)]
    both = [("weights", False, 0), ("weights", False, 1)]
    assert kinds[0] == [("means", False, 0), *both]
    assert kinds[1] == [("means", True, 0), *both]
    # Eight samples, and no mean of fewer than nine: nothing left, and nothing was refused.
    assert kinds[2] == both
    assert kinds[3] == [("means", False, 0), ("weights", False, 0), ("weights", True, 1)]
    assert len(strategy.pool) == 2
    (first,) = (r for c, _, _, r in grid.kept if c == 3 and r.has_content() and "arrays" in r.content)
    weights = network().state_dict()
    change = [t - weights[n] for n, t in first.content["arrays"].to_torch_state_dict().items()]
    assert 0 < float(torch.cat([c.flatten() for c in change]).norm()) <= 1e-3 * (1 + 1e-4)


def share_query(grid: Nodes, sharing: Any, **fields: Any) -> Message:
    """The reply of one node that is asked to share."""
    content = attach(RecordDict(), {"sharing": sharing, "min_mean": 2, **fields})
    (reply,) = grid.send_and_receive([Message(content, 1000, f"query.{SHARE_QUERY}")])
    return reply


def asked_to_share(folder: Path, file: str, run: int, **sharing: Any) -> Message:
    """The reply of client 2, which has this site file, to a request for means in a run."""
    (folder / "site.toml").write_text(file)
    grid = Nodes([{"partition-id": 2, "site": str(folder / "site.toml")}], run, app=App().app)
    return share_query(grid, {"name": "means", **sharing}, seed=run)


def test_means_of_a_users_own_app_are_the_same_in_every_run(tmp_path: Path) -> None:
    asked = functools.partial(asked_to_share, tmp_path, "", samples_per_mean=4)
    first, *others = (asked(run).content["fedblend-tensors"].to_torch_state_dict()["x"] for run in range(5))
    assert len(first) == 2
    assert all(torch.equal(first, other) for other in others)
    for other in ({"samples_per_mean": 3}, {"samples_per_mean": 2}, {"noise": 0.1}):
        assert "shares no other (sharings in its site file: 1)" in asked(9, **other).error.reason


@pytest.mark.parametrize(("work", "before", "size"), [("payload", [], "all"), ("_count", ["all"], 7)])
def test_a_request_that_others_overtook_gets_no_means_and_is_not_told_by_how_many_samples_it_differs(
    work: str, before: list[Any], size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, most = getattr(SharingLedger, work), len(before) + 1
    asked = functools.partial(asked_to_share, tmp_path, f"sharings = {most}\n")

    def overtaken(self: SharingLedger, *args: Any) -> Any:
        made = plain(self, *args)
        monkeypatch.setattr(SharingLedger, work, plain)
        assert not asked(1, samples_per_mean=4).has_error()
        return made

    for earlier in before:
        assert not asked(0, samples_per_mean=earlier).has_error()
    monkeypatch.setattr(SharingLedger, work, overtaken)
    for run in (2, 3):
        assert f"shares no other (sharings in its site file: {most})" in asked(run, samples_per_mean=size).error.reason


def test_means_of_a_users_own_app_do_not_tell_of_a_few_samples(tmp_path: Path) -> None:
    def asked(run: int, size: Any) -> Message:
        return asked_to_share(tmp_path, "sharings = 3\n", run, samples_per_mean=size)

    # Of eight samples: all, four and four, and seven without the last one, which counts, too.
    assert [asked(run, size).has_error() for run, size in enumerate(("all", 4, 7))] == [False, False, True]
    assert "the difference would tell of fewer than 2 samples" in asked(3, 7).error.reason
    assert "this site has shared 3 payloads" in asked(4, 5).error.reason


@pytest.mark.parametrize("file", [None, 'allow = ["raw", "seeds", "means"]'])
def test_raw_samples_never_leave_a_users_own_app(file: str | None, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(file or "")
    grid = grid_of(1, **({"site": str(tmp_path / "site.toml")} if file else {}))

    def asked(sharing: Any) -> Message:
        return share_query(grid, sharing, min_mean=1, seed=0)

    for sharing in ("raw", "raw-seeds", "mixed-seeds", {"name": "xor-seeds"}, None, "means!"):
        assert asked(sharing).has_error()
    single = {"name": "means", "samples_per_mean": 1}
    if not file:
        assert "fedblend-tensors" not in asked(single).content
    assert "fedblend-tensors" in asked("means").content
    assert "gives them once" in asked("means").error.reason
    if file:
        # For which means it has too few samples would tell the sizes of its classes.
        assert "shares no other" in asked(single).error.reason


def test_a_site_with_a_file_trains_on_no_message_that_leaves_its_policy_out(tmp_path: Path) -> None:
    app = ClientApp(mods=[blend_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord({"w": torch.ones(2)})}), reply_to=message)

    (tmp_path / "site.toml").write_text('allow = []\naudit = "audit.jsonl"\n')
    for config, refused in (({}, False), ({"site": str(tmp_path / "site.toml")}, True)):
        grid = Nodes([{"partition-id": 0, **config}], app=app)
        content = RecordDict({"arrays": ArrayRecord({"w": torch.zeros(2)})})
        (reply,) = grid.send_and_receive([Message(content, 1000, "train")])
        assert reply.has_error() == refused
    assert "trains on requests of a fedblend.flower.Strategy only" in reply.error.reason


def test_an_app_of_your_own_tells_the_server_no_path_of_the_site(tmp_path: Path) -> None:
    app = ClientApp(mods=[blend_mod])
    add_sharing(app, Inputs(shape=(2,), outputs=2), lambda context: (torch.zeros(4, 2), torch.arange(4) % 2))
    path = tmp_path / "site.toml"
    path.write_text('audit = "audit.jsonl"\n')
    grid = Nodes([{"partition-id": 0, "site": str(path)}], app=app)
    (tmp_path / "audit.shared").write_text("no folder")
    for why in ("cannot be used for this site's secret", "is not valid TOML"):
        reason = share_query(grid, {"name": "means", "samples_per_mean": 2}, seed=0).error.reason
        assert why in reason
        assert str(tmp_path) not in reason
        path.write_text("=")
        site_policy._read_cached.cache_clear()


def pool_with(sent: dict[int, dict[str, torch.Tensor]], stated: Any = 9, method: Any = "fedmix") -> Pool:
    """The pool of a strategy, where some clients send these tensors in place of their means."""

    def lie(client: int, message: Message, reply: Message) -> Message:
        if client not in sent or not message.metadata.message_type.startswith("query"):
            return reply
        return Message(attach(RecordDict(), {"samples": stated}, ArrayRecord(sent[client])), reply_to=message)

    grid = grid_of().spoiled(lie)
    strategy = Strategy(FedAvg(fraction_evaluate=0.0), method, INPUTS)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=1)
    return strategy.pool


def test_a_payload_of_means_is_alone_left_out_and_none_at_all_is_an_error() -> None:
    nan = {"x": torch.full((1, 5), torch.nan), "y": torch.zeros(1, 3)}
    pool = pool_with({0: nan, 1: {"x": torch.zeros(1, 4), "y": torch.zeros(1, 3)}})
    assert len(pool) == 1
    torch.testing.assert_close(pool.tensors["x"][0], samples(2)[0].mean(0))
    with pytest.raises(FedblendError, match="no node shares anything: too few samples"):
        start("fedmix", grid_of(), min_mean=100)


ENTRY, FAR = {"x": torch.zeros(1, 5), "y": torch.full((1, 3), 1 / 3)}, torch.tensor(-1e30)
MULTIPLIED = {"name": "fedmix", "sharing": {"multiplier": 2.0}}
MANY = {"x": torch.zeros(300_000, 4), "y": torch.zeros(300_000, 3)}


@pytest.mark.parametrize(
    ("entry", "stated", "method", "why"),
    [
        (MANY, 9, "fedmix", "it sent 300,000 entries, and its 9 samples make 4 at most"),
        (ENTRY | {"x": torch.tensor(0.0)}, 9, "fedmix", "it sent no entries"),
        *((ENTRY, stated, "fedmix", "it states no valid number of its samples") for stated in (None, True, 10**9)),
        # Targets have bounds always; inputs with a multiplier, which needs them in the range of `mean` and `std`.
        (ENTRY | {"y": FAR.expand(1, 3)}, 6, "fedmix", "it sent means 'y' with a number beyond the bounds"),
        (ENTRY | {"y": FAR.expand(1, 3)}, 6, MULTIPLIED, "it sent means 'y' with a number beyond the bounds"),
        (ENTRY | {"x": FAR.expand(1, 5)}, 6, MULTIPLIED, "it sent means 'x' with a number beyond the bounds"),
        (ENTRY | {"x": FAR.expand(1, 5)}, 6, "fedmix", ""),
    ],
)
def test_a_strategy_refuses_wrong_entries(entry: Any, stated: Any, method: Any, why: str, caplog: Any) -> None:
    pool = pool_with({1: {name: tensor.contiguous() for name, tensor in entry.items()}}, stated, method)
    assert len(pool) == 3 - bool(why)
    assert why in caplog.text
    assert bool(why) == ("shares nothing" in caplog.text)


@pytest.mark.parametrize("method", ["fedadam", {"name": "aggenhance", "server_step": {"steps": 3, "epochs": 2}}])
def test_a_server_step_reads_aggregate_uploads_by_node_and_what_it_kept(method: Any) -> None:
    strategy = Strategy(FedAvg(fraction_evaluate=0.0), method, INPUTS, model=network(), lr=0.5, seed=4)
    inner, rounds = strategy.inner.aggregate_train, []

    def noted(server_round: int, replies: Any) -> Any:
        by_node = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        uploads = dict(enumerate(reply.content["arrays"].to_torch_state_dict() for reply in by_node))
        made = inner(server_round, replies)
        rounds.append((made[0].to_torch_state_dict(), uploads))
        return made

    strategy.inner.aggregate_train = noted
    result = strategy.start(grid_of(), ArrayRecord(network().state_dict()), num_rounds=2)

    step, weights, names = strategy.method.server_step, network().state_dict(), list(network().state_dict())
    about = {"shape": INPUTS.shape, "scale": INPUTS.scale, "task": INPUTS.task}
    spec = ModelSpec(model=network().eval(), trained=names, **about)
    state = step.init_server_state(spec, weights)
    for round, (aggregate, uploads) in enumerate(rounds):
        server = ServerContext(
            **vars(spec), round=round, lr=0.5, rng=stream(4, "server", round), state=state, start=weights,
            query=lambda question, uploads=uploads: list(step.respond(uploads, question, spec).values()),
        )  # fmt: skip
        weights, state = step.refine(aggregate, server)
    assert len(rounds) == 2
    assert state
    close(result.arrays.to_torch_state_dict(), weights)


MOMENTS = ["fedadagrad", "fedadam", "fedavgm", "fedyogi"]
MIXED = ["fedmix+fed-augmix", "naivemix+fed-augmix"]
FIT = [*MOMENTS, *MIXED, "aggenhance", "fed-augmix", "fedavg", "fedmix", "fedmix-checked", "fedmix-published"]
FIT += ["fedntd", "localmix", "naivemix", "vanilla-fl", "virtual-means"]


def test_supported_methods() -> None:
    fit = {*FIT, *(f"fedprox+{name}" for name in FIT if name not in ("fedavg", *MOMENTS)), "fedprox"}
    for name in presets.presets():
        if name in fit:
            supported_method(name)
        else:
            with pytest.raises(FedblendError, match=r"does not run in an app of your own: .*fedblend federation app"):
                supported_method(name)


def test_the_page_lists_the_supported_methods() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    table = page.partition("| method | how it runs |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall("`([^`]+)`", "".join(row.split("|")[1:2]))]
    assert sorted(listed) == sorted([*FIT, "fedprox", "fedprox+"])


@pytest.mark.parametrize("method", sorted({*FIT} - {"fed-augmix", *MIXED}))
def test_every_supported_method_trains(method: str) -> None:
    trained, first = start(method, grid_of(), rounds=1, model=network(), lr=0.1), network().state_dict()
    assert not any(torch.equal(trained[name], first[name]) for name in first)


@each(
    ("method", "expected"),
    [
        ("mix2fld", "clients send 'outputs'"),
        ("xormixfl", "clients send 'nothing'"),
        ("aggenhance-secure", "sends queries to clients"),
        ("fedmix-hidden", "shares again during training"),
        ("global-mixup", "sends raw samples"),
        ({"name": "fedmix", "sharing": "secure-means"}, "masks shared data in several exchanges"),
        ("local-means", "sends shared data to other clients and uses them for nothing else, unlike 'local-means'"),
        ("scaffold", "keeps state at clients"),
        ("pfedme", "keeps a model or layers at each client"),
        ("server-means", "trains on data that clients share with the server"),
        ({"name": "fedavg", "aggregator": "median"}, "the wrapped strategy aggregates"),
        ({"name": "fedavg", "objective": "fedmix"}, "needs data that no sharing provides: x, y"),
        ({"name": "fedmix", "objective": "global-mixup"}, "needs raw samples, unlike 'means'"),
        ("fedmixx", "did you mean 'fedmix'"),
        ({"name": "fedmix", "objective": {"lambda": 2}}, "method.objective.lambda: 2 is not valid"),
    ],
)
def test_an_unsupported_method_is_refused_with_the_reason(method: Any, expected: str) -> None:
    with pytest.raises(FedblendError, match=expected.replace("'", "['']")):
        Strategy(FedAvg(), method, INPUTS, model=network(), lr=0.1)


ARGUMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "inner": ("a strategy of Flower, such as FedAvg(); the method comes second", (FedAvg, "fedavg")),
    "inputs": ("Inputs(shape=..., outputs=...)", ((5,),)),
    "model": ("a torch.nn.Module such as Net(), or None", ("net",)),
    "lr": ("a number above 0", (-1, "0.1", float("nan"))),
    "seed": ("a whole number from 0 up", (-1, 1.5)),
    "min_mean": ("2 or more, so that no single samples leave", (1, 2.5)),
    "timeout": ("a number of seconds above 0", (0, float("inf"))),
}


OF_INPUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "shape": ("whole numbers from 1 up, such as (784,) or (1, 28, 28)", ((), (3, 0), 784)),
    "outputs": ("a whole number from 1 up", (0,)),
    "std": ("one number above 0, or one for each of 3", (0.0, None)),
    "mean": ("one number, or one for each of 3", ([0.1, 0.2], "0.5")),
    "kind": ("classification, multi-label, regression", ("other",)),
}
MADE: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "Strategy": (Strategy, {"inner": FedAvg(), "method": "fedmix", "inputs": INPUTS}, ARGUMENTS),
    "inputs": (Inputs, {"shape": (3, 8, 8), "outputs": 2}, OF_INPUTS),
}


@each(("of", "field"), [(of, field) for of, (_, _, arguments) in MADE.items() for field in arguments])
def test_an_invalid_argument_is_one_message(of: str, field: str) -> None:
    made, given, arguments = MADE[of]
    valid, values = arguments[field]
    for value in values:
        with pytest.raises(FedblendError) as error:
            made(**{**given, field: value})
        assert str(error.value) == f"{of}: {field}: {value!r} is not valid: {valid}"


NET = {"method": "aggenhance", "model": network(), "lr": 0.1}


@each(
    ("options", "expected"),
    [
        ({"method": "aggenhance"}, "needs the network and a learning rate"),
        ({"method": "aggenhance", "model": network()}, "needs the network and a learning rate"),
        ({"method": "fedadam"}, r"'fedadam' needs the network: give Strategy\(\.\.\., model=\.\.\.\)$"),
        ({**NET, "inputs": Inputs(shape=(6,), outputs=3)}, r"\[1, 6\] give an error: mat1 and mat2 shapes cannot"),
        ({**NET, "inputs": Inputs(shape=(5,), outputs=4)}, r"\[1, 5\] give \[1, 3\]; valid: a network whose outputs"),
    ],
)
def test_a_network_and_arguments_that_do_not_fit_the_method_are_one_message(options: Any, expected: str) -> None:
    with pytest.raises(FedblendError, match=expected):
        Strategy(**{"inner": FedAvg(), "inputs": INPUTS, **options})


def test_the_users_network_keeps_its_mode() -> None:
    Strategy(FedAvg(), "aggenhance", INPUTS, model=(model := network()), lr=0.1)
    assert all(module.training for module in model.modules())


def test_another_network_than_the_first_arrays_is_one_message() -> None:
    other = nn.Sequential(network(), nn.Linear(3, 3))
    with pytest.raises(
        FedblendError, match=r"^Strategy: model: its tensors are not those of the strategy's first arrays"
    ):
        start("fedadam", grid_of(), rounds=1, model=other)


def test_numbers_of_inputs_may_be_lists_tensors_and_arrays() -> None:
    inputs = Inputs(shape=[3, 8, 8], outputs=2, mean=torch.tensor([0.1, 0.2, 0.3]), std=np.float32(0.5))  # type: ignore
    assert inputs.shape == (3, 8, 8)
    assert inputs.scale.unit_offset.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_a_loss_without_a_strategy_is_an_error() -> None:
    with pytest.raises(FedblendError, match=r"no message of a fedblend\.flower\.Strategy"):
        blended_loss(Context(1, 2, {}, RecordDict(), {}), network(), INPUTS)


@pytest.mark.slow
def test_the_example_runs_as_it_stands(capsys: Any) -> None:
    blended = script("examples/flower_app/blended.py")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["components"] == {"serverapp": "blended:server_app", "clientapp": "blended:client_app"}
    # `flwr run` reads the file for these before it sends the app anywhere.
    for name in project["components"].values():
        assert validate(name, project_dir=EXAMPLE) == (True, None)
    for method, shares in ((project["config"]["method"], 3), ("aggenhance", 0)):
        grid = Nodes(({"partition-id": c, "num-partitions": 3} for c in range(3)), app=blended.client_app)
        settings = {**project["config"], "method": method}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            blended.server_app(grid, Context(1, 1, {}, RecordDict(), settings))
        assert sum(kind.startswith("query") for _, kind, *_ in grid.sent) == shares
        # Ten labels: a model that learned nothing has a tenth right.
        assert float(capsys.readouterr().out.split("accuracy ")[1]) > 0.3
