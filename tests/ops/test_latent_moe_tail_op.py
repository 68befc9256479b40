# SPDX-License-Identifier: Apache-2.0
"""The custom ops kernellib::latent_moe_tail and _out: opcheck, compilation, fakes, `out=`.

They run the reference target: what is tested here is the op, not a kernel.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from kernellib import ContractError, latent_moe_tail, supports_latent_moe_tail
from kernellib.emulator import active_session, emulated
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG
from kernellib.ops.latent_moe_tail.reference import (
    TailInputs,
    against_oracle,
    make_inputs,
    oracle_f64,
    production_chain,
)
from kernellib.targets import execution_scope

REFERENCE = {"target": "reference"}
EPS = 1e-5


@pytest.fixture(scope="module")
def inputs() -> TailInputs:
    return make_inputs(21)


@pytest.fixture(scope="module")
def expected(inputs: TailInputs) -> torch.Tensor:
    return production_chain(*inputs, EPS)


def poison() -> torch.Tensor:
    return torch.full((1, 7168), float("nan"), dtype=torch.bfloat16)


def test_opcheck(inputs: TailInputs) -> None:
    results = torch.library.opcheck(torch.ops.kernellib.latent_moe_tail, tuple(inputs), REFERENCE)
    results_out = torch.library.opcheck(
        torch.ops.kernellib.latent_moe_tail_out, (*inputs, poison()), REFERENCE
    )
    for result in (results, results_out):
        assert set(result.values()) == {"SUCCESS"}
        assert "test_faketensor" in result
        assert "test_aot_dispatch_dynamic" in result


def test_new_result_and_out_agree(inputs: TailInputs, expected: torch.Tensor) -> None:
    out = poison()
    returned = latent_moe_tail(*inputs, eps=EPS, out=out, target="reference")
    assert returned is out
    assert torch.equal(out, expected)
    first = latent_moe_tail(*inputs, eps=EPS, target="reference")
    second = latent_moe_tail(*inputs, eps=EPS, target="reference")
    assert torch.equal(first, expected)
    assert first.data_ptr() != second.data_ptr()


def test_a_thread_joins_no_session_that_ends_under_it(inputs: TailInputs) -> None:
    """Threads without a session of their own take turns; four at once, with nothing compiled yet."""
    p, y = oracle_f64(*inputs, EPS)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(latent_moe_tail, *inputs, eps=EPS, target="emulator") for _ in range(4)]
        results = [run.result() for run in runs]
    for result in results:
        assert against_oracle(result, p, y, inputs.shared).judged_ulp_error <= 1.0


def test_a_session_of_another_thread_is_not_closed_under_a_launch() -> None:
    """The scope of one thread ends only after it let the other's begin."""
    first_inside, second_tried = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with execution_scope("emulator"):
            first_inside.set()
            second_tried.wait(0.2)
            order.append("first ends")

    def second() -> None:
        first_inside.wait()
        with execution_scope("emulator"):
            second_tried.set()
            order.append("second begins")
            assert active_session() is not None

    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(first), pool.submit(second)]:
            run.result()
    assert order == ["first ends", "second begins"]


def test_a_launch_joins_the_callers_session_without_waiting() -> None:
    """Ranks of a World wait for each other inside their launches."""
    both = threading.Barrier(2, timeout=20)

    def rank() -> None:
        with execution_scope("emulator"):
            both.wait()

    with emulated(), ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(rank), pool.submit(rank)]:
            run.result()


def test_the_reference_keeps_bf16_under_autocast(inputs: TailInputs, expected: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(latent_moe_tail(*inputs, eps=EPS, target="reference"), expected)


@pytest.mark.parametrize("eps", [1, True])
def test_eps_is_a_float_in_a_compiled_graph_too(inputs: TailInputs, eps: object) -> None:
    compiled = torch.compile(
        lambda *args: latent_moe_tail(*args, eps=eps, target="reference"), backend="eager"
    )
    with pytest.raises(ContractError, match="eps"):
        compiled(*inputs)


def test_out_is_no_input_in_a_compiled_graph_too(inputs: TailInputs) -> None:
    shared = inputs.shared.clone()
    tensors = (*inputs[:3], shared)
    compiled = torch.compile(
        lambda *args: latent_moe_tail(*args, out=args[3], target="reference"), backend="aot_eager"
    )
    with pytest.raises(ContractError, match="out"):
        compiled(*tensors)
    assert torch.equal(shared, inputs.shared)


def test_a_tangent_is_refused_and_not_lost(inputs: TailInputs) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs.routed, torch.ones_like(inputs.routed))
        with pytest.raises(ContractError, match="tangent"):
            latent_moe_tail(dual, *inputs[1:], target="reference")
        assert latent_moe_tail(*inputs, target="reference").isfinite().all()


def test_an_inference_tensor_is_written_in_inference_mode_only(inputs: TailInputs) -> None:
    with torch.inference_mode():
        out = poison()
        latent_moe_tail(*inputs, out=out, target="reference")
        assert out.isfinite().all()
        out.fill_(float("nan"))
    for target in ("reference", "emulator"):
        with pytest.raises(ContractError, match="inference"):
            latent_moe_tail(*inputs, out=out, target=target)
        assert out.isnan().all()


class Liar(float):
    """Says another value than torch would read."""

    def __float__(self) -> float:
        return 1e-6


class Angry:
    """Objects to being asked."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("no")


def test_what_counts_is_the_float_that_torch_reads(inputs: TailInputs) -> None:
    assert not supports_latent_moe_tail(*inputs, eps=Liar(-1.0), target="reference")
    assert supports_latent_moe_tail(*inputs, eps=Liar(1e-5), target="reference")
    assert not supports_latent_moe_tail(*inputs, eps=Angry(), target="reference")


def test_inputs_are_left_alone(inputs: TailInputs) -> None:
    before = [tensor.clone() for tensor in inputs]
    latent_moe_tail(*inputs, target="reference", out=poison())
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_in_one_graph(inputs: TailInputs, expected: torch.Tensor, backend: str) -> None:
    def step(
        routed: torch.Tensor, gamma: torch.Tensor, up: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor:
        return latent_moe_tail(routed, gamma, up, shared, eps=EPS, target="reference") * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*inputs), expected * 2)
    changed = inputs._replace(routed=inputs.routed.neg())  # the same graph must see new values
    assert torch.equal(compiled(*changed), production_chain(*changed, EPS) * 2)


def test_compiled_out_is_written(inputs: TailInputs, expected: torch.Tensor) -> None:
    def step(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return latent_moe_tail(*tensors, eps=EPS, out=out, target="reference")

    out = poison()
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(out, *inputs)
    assert torch.equal(out, expected)
    assert torch.equal(result, expected)


def test_compiled_call_keeps_the_contract(inputs: TailInputs) -> None:
    compiled = torch.compile(
        lambda *tensors: latent_moe_tail(*tensors, target="reference"), fullgraph=True, backend="aot_eager"
    )
    flat = torch.zeros(7168 + 8, dtype=torch.bfloat16)
    misaligned = inputs._replace(shared=flat[1:7169].view(1, 7168))
    with pytest.raises(ContractError, match="alignment"):
        compiled(*misaligned)
    with pytest.raises(Exception, match="shape"):  # found while tracing; dynamo wraps it
        compiled(*inputs._replace(shared=torch.zeros(1, 7167, dtype=torch.bfloat16)))


def test_fake_result_has_the_real_metadata(inputs: TailInputs) -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        result = torch.ops.kernellib.latent_moe_tail(*fakes)
        assert (tuple(result.shape), result.dtype, str(result.device)) == ((1, 7168), torch.bfloat16, "cpu")
        with pytest.raises(ContractError, match="dtype"):
            torch.ops.kernellib.latent_moe_tail(fakes[0].float(), *fakes[1:])


def test_config_travels_by_name(inputs: TailInputs) -> None:
    with pytest.raises(ContractError, match="config"):  # understood, and refused by this target
        torch.ops.kernellib.latent_moe_tail(*inputs, target="reference", config=DEFAULT_CONFIG.name)


def test_public_names() -> None:
    import kernellib  # noqa: PLC0415

    for name in kernellib.__all__:
        assert getattr(kernellib, name).__module__.startswith("kernellib.ops.")
        assert name in dir(kernellib)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kernellib.no_such_name


def test_asking_to_compile_only_is_an_error_not_a_missing_result(
    inputs: TailInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernellib.ops.latent_moe_tail import kernel_gfx950  # noqa: PLC0415

    monkeypatch.setattr(kernel_gfx950, "_compiled", {})
    monkeypatch.setattr(kernel_gfx950.flyc, "compile", lambda launcher, *arguments: None)
    with pytest.raises(kernel_gfx950.TailLaunchError, match="COMPILE_ONLY"):
        kernel_gfx950.launch(DEFAULT_CONFIG, inputs, EPS, poison(), "mi355x")
    assert kernel_gfx950._compiled == {}


def test_configurations_and_targets_do_not_share_a_compiled_kernel(
    inputs: TailInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernellib.ops.latent_moe_tail import kernel_gfx950  # noqa: PLC0415

    calls: list[tuple[str, tuple[object, ...]]] = []

    def compile_and_launch(launcher: object, *arguments: object) -> object:
        name = f"kernel {len(calls)}"
        calls.append((name, arguments))
        return lambda *later: calls.append((name, later))

    monkeypatch.setattr(kernel_gfx950, "_compiled", {})
    monkeypatch.setattr(kernel_gfx950.flyc, "compile", compile_and_launch)
    other = dataclasses.replace(DEFAULT_CONFIG, weight_cache="normal")
    for config, target in ((DEFAULT_CONFIG, "mi355x"), (DEFAULT_CONFIG, "emulator"), (other, "mi355x")):
        kernel_gfx950.launch(config, inputs, EPS, poison(), target)
    out = poison()
    kernel_gfx950.launch(DEFAULT_CONFIG, inputs, EPS, out, "mi355x")  # compiled already: launches, once
    assert [name for name, _ in calls] == ["kernel 0", "kernel 1", "kernel 2", "kernel 0"]
    addresses = [tensor.data_ptr() for tensor in (*inputs, out)]
    assert list(calls[-1][1][:6]) == [*addresses, EPS]


def test_inference_mode(inputs: TailInputs, expected: torch.Tensor) -> None:
    """Serving engines run under it; its tensors have no version counter for a written `out` to bump."""
    with torch.inference_mode():
        tensors = TailInputs(*(tensor.clone() for tensor in inputs))
        out = poison()
        latent_moe_tail(*tensors, eps=EPS, out=out, target="reference")
        assert torch.equal(out, expected)
        assert torch.equal(latent_moe_tail(*tensors, eps=EPS, target="reference"), expected)


def test_a_configuration_compiles_into_the_graph(inputs: TailInputs) -> None:
    compiled = torch.compile(
        lambda *tensors: latent_moe_tail(*tensors, eps=EPS, target="emulator", config=DEFAULT_CONFIG),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(*inputs), latent_moe_tail(*inputs, eps=EPS, target="emulator"))
