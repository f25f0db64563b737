"""A shared MLP as experts of the same stack: what experts and MLP give apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvtide.layers import Blueprint, Ops
from kvtide.layers.backend.arithmetic import Deterministic
from kvtide.layers.backend.kernel_args import ExpertActivation, RoutingRule
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.elementwise import sqrt_softplus
from kvtide.layers.kernels.moe_experts import arrange, mix_experts, tiles_for
from kvtide.layers.moe import Experts, Mixture, Router, SharedMLP, experts_of_mlp
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from kvtide.models.nemotron_h import PlainMLP
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.config import Config
from kvtide.spec.pool import NOTHING
from tests.models.tiny import Tensors

MEMORY = ModelMemory("toy", 1, (PoolSpec("kv", (), NOTHING),), 1)
INPUTS, WIDTH, VOCABULARY = 48, 24, 40
GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """`wide`: how many times as wide as an expert the shared MLP is."""

    experts: int
    choice: RoutingRule
    wide: float = 1
    names: tuple[str, ...] = GATED
    limit: float | None = None
    activation: str = "silu"
    by_table: bool = False
    biased: tuple[str, ...] = ()

    def weights(self, device: torch.device) -> Tensors:
        tensors = {"gate.weight": (self.experts, INPUTS), "gate.bias": (self.experts,)}
        wide = int(WIDTH * self.wide)
        widths = {f"experts.{n}": WIDTH for n in range(self.experts)} | {"shared": wide}
        for name, width in widths.items():
            for projection in self.names:
                shape = (INPUTS, width) if projection == "down_proj" else (width, INPUTS)
                tensors[f"{name}.{projection}.weight"] = shape
                if name.split(".")[0] in self.biased:
                    tensors[f"{name}.{projection}.bias"] = shape[:1]
        made = {
            name: randn(*shape, seed=number, device=device) * shape[-1] ** -0.5
            for number, (name, shape) in enumerate(tensors.items())
        }
        order = randn(VOCABULARY, self.experts, seed=999, device=device).argsort(-1)
        made["gate.table"] = order[:, : self.choice.count].contiguous()
        return Tensors(made)

    def blueprint(
        self, ops: Ops, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Blueprint:
        config = Config("toy", {"hidden_act": self.activation})
        return Blueprint(config, self.weights(device), MEMORY, ops, dtype)

    def mixture(self, blueprint: Blueprint, shared_limit: float | None = None) -> Mixture:
        table = "table" if self.by_table else None
        router = Router(blueprint.under("gate"), self.choice, sqrt_softplus, "bias", table)
        shared = self.shared(blueprint, shared_limit or self.limit)
        under = blueprint.under("experts")
        return Mixture.numbered(router, under, shared, *self.names, limit=self.limit)

    def shared(self, blueprint: Blueprint, limit: float | None) -> SharedMLP:
        under = blueprint.under("shared")
        if self.names == GATED:
            return under.mlp(limit=limit)
        up, down = under.columns("up_proj"), under.rows("down_proj")
        return PlainMLP(blueprint.arithmetic, up, down, blueprint.activation())


CASES = {
    "one more": Case(6, RoutingRule(2, scale=1.5)),
    "three more, limited": Case(6, RoutingRule(2), wide=3, limit=0.3),
    "two more without a gate": Case(5, RoutingRule(3), 2, PLAIN, activation="relu2"),
    "groups that are left to torch": Case(6, RoutingRule(2, groups=3, allowed=2), wide=2),
    "by token": Case(8, RoutingRule(3, scale=2.5), limit=0.5, by_table=True),
    "as many experts as fill the bins": Case(16, RoutingRule(4), wide=2),
}
APART = {
    "no whole number": Case(6, RoutingRule(2), wide=1.5),
    "narrower": Case(6, RoutingRule(2), wide=0.5),
    "a shared MLP with biases": Case(6, RoutingRule(2), biased=("shared",)),
    "experts with biases": Case(6, RoutingRule(2), biased=("experts",)),
}


def randn(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def rows(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(3))
    return randn(count, INPUTS, seed=1, device=device), tokens.to(device)


def experts_of(mixture: Mixture) -> Experts:
    assert isinstance(mixture.experts, Experts)
    return mixture.experts


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("case", CASES)
def test_one_stack_gives_what_experts_and_mlp_give(
    case: str, tokens: int, device: torch.device
) -> None:
    given = CASES[case]
    joined = given.mixture(given.blueprint(TritonOps(), device))
    apart = given.mixture(given.blueprint(TorchOps(Deterministic()), device))
    assert joined.shared is None and joined.beside == experts_of(joined).beside == given.wide
    assert apart.shared is not None and apart.beside == experts_of(apart).beside == 0
    at = rows(tokens, device)
    torch.testing.assert_close(joined(*at), apart(*at), rtol=0, atol=2e-5)


def test_the_stack_holds_the_shared_mlp_and_nothing_twice(device: torch.device) -> None:
    case = CASES["three more, limited"]
    blueprint = case.blueprint(TritonOps(), device)
    mixture = case.mixture(blueprint)
    experts, shared = experts_of(mixture), case.shared(blueprint, case.limit)
    assert experts.group.own == range(9) and mixture.shared is None
    assert experts.gate_up.weight.shape == (9, 2 * WIDTH, INPUTS)
    gates, ups = (half.flatten(0, 1) for half in experts.gate_up.weight[6:].chunk(2, dim=1))
    assert torch.equal(torch.cat([gates, ups]), shared.first.weight)
    assert torch.equal(torch.cat(list(experts.down.weight[6:]), dim=1), shared.down.weight)


@pytest.mark.parametrize("case", APART)
def test_an_mlp_of_another_form_stays_beside_the_experts(case: str, device: torch.device) -> None:
    given = APART[case]
    mixture = given.mixture(given.blueprint(TritonOps(), device))
    assert mixture.shared is not None and mixture.beside == 0
    assert experts_of(mixture).gate_up.weight.shape[0] == given.experts
    at, wanted = rows(5, device), given.mixture(given.blueprint(TorchOps(Deterministic()), device))
    torch.testing.assert_close(mixture(*at), wanted(*at), rtol=0, atol=2e-5)


def test_an_mlp_with_another_limit_or_activation_is_not_cut(device: torch.device) -> None:
    case = CASES["one more"]
    blueprint = case.blueprint(TritonOps(), device)
    assert case.mixture(blueprint, shared_limit=0.7).beside == 0
    shared = case.shared(blueprint, None)
    assert len(experts_of_mlp(shared, WIDTH, ExpertActivation())) == 1
    assert experts_of_mlp(shared, WIDTH, ExpertActivation(torch.cos)) == []
    assert experts_of_mlp(shared, WIDTH, ExpertActivation(gated=False)) == []


def test_several_ranks_keep_the_mlp_apart(device: torch.device) -> None:
    case = CASES["one more"]
    for ranks, beside in ((ALONE, 1), (TensorRanks(0, 2), 0), (TensorRanks(1, 2), 0)):
        mixture = case.mixture(replace(case.blueprint(TritonOps(), device), ranks=ranks))
        assert mixture.beside == beside and (mixture.shared is None) == (beside > 0)
        assert len(experts_of(mixture).group.own) == 6 // ranks.count + beside


def test_half_precision_is_rounded_where_experts_round(device: torch.device) -> None:
    """In fp16, which an interpreter multiplies rightly."""
    case = CASES["three more, limited"]
    joined = case.mixture(case.blueprint(TritonOps(), device, torch.float16))
    exact = case.mixture(case.blueprint(TorchOps(Deterministic()), device))
    x, tokens = rows(7, device)
    found, wanted = joined(x.half(), tokens), exact(x.half().float(), tokens)
    assert joined.beside == 3 and found.dtype == torch.float16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


def test_experts_for_all_have_no_say_in_the_size_of_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, asked, arranged = CASES["three more, limited"], [], []
    at = "kvtide.layers.kernels.moe_experts."
    monkeypatch.setattr(at + "tiles_for", lambda *of: asked.append(of[:2]) or tiles_for(*of))
    monkeypatch.setattr(at + "arrange", lambda *of: arranged.append(of[:2]) or arrange(*of))
    mixture = case.mixture(case.blueprint(TritonOps(), device))
    x, tokens = rows(4, device)
    routing = mixture.router(x, tokens, mixture.beside)
    mix_experts(experts_of(mixture), x, routing)
    assert asked == [(4 * 2, 6)]
    assert arranged[0][0].shape == (4, 5) and arranged[0][1] == range(9)
