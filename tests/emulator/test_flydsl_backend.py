# SPDX-License-Identifier: Apache-2.0
"""FlyDSL launchers inside `emulated()`: arguments, several kernels, interleaving, errors, clean exit."""

from __future__ import annotations

import os
import threading

import flydsl.compiler as flyc
import flydsl.expr as fx
import numpy as np
import pytest
import torch

from kernellib import emulator
from kernellib.emulator.flydsl_backend import ENVIRONMENT
from tests.emulator import flydsl_kernels as kernels

POISON = float("nan")


def test_tensor_address_scalar_stream_and_dynamic_lds() -> None:
    x, y = torch.arange(1000, dtype=torch.float32), torch.full((1000,), POISON)
    with emulator.emulated() as session:
        kernels.axpy()(x, y.data_ptr(), 1000, 2.5, fx.Stream(0xABC))
    assert torch.equal(y, x * 2.5)
    (report,) = session.launches
    assert (report.kernel_name, report.grid, report.block) == ("test_axpy", (4, 1, 1), (256, 1, 1))
    assert (report.lds_bytes, report.stream, report.num_waves) == (1024, 0xABC, 16)
    assert report.bytes_by_space["global"]["store"] == 4000
    # LLVM forwards the stored value: the listing has no LDS load
    assert report.bytes_by_space["lds"] == {"load": 0, "store": 4000, "atomic": 0}
    assert report.instruction_counts["s_endpgm"] == 16
    assert report.lane_instructions == 64 * sum(report.instruction_counts.values())


def test_block_sum_with_barrier() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-50, 50, (7 * 256,), generator=generator).float()
    out = torch.full((7,), POISON)
    with emulator.emulated() as session:
        kernels.block_sum()(x.data_ptr(), out.data_ptr(), 7)
    assert torch.equal(out, x.reshape(7, 256).sum(1))
    assert session.launches[0].instruction_counts["s_barrier"] == 28


def test_two_kernels_called_twice_share_one_compilation() -> None:
    x = torch.ones(128)
    run = kernels.two_kernels()
    with emulator.emulated() as session:
        run(x, 2)
        run(x, 2)
    assert torch.equal(x, torch.full((128,), 7.0))
    assert [r.kernel_name for r in session.launches] == ["test_double", "test_increment"] * 2
    assert len(run._mem_cache) == 1


def test_compiled_function_skips_tracing() -> None:
    x, y = torch.arange(512, dtype=torch.float32), torch.zeros(512)
    with emulator.emulated() as session:
        fast = flyc.compile(kernels.axpy(), x, y.data_ptr(), 512, 2.0, fx.Stream(None))
        assert torch.equal(y, x * 2)
        fast(x, y.data_ptr(), 256, 3.0, fx.Stream(7))
    assert torch.equal(y[:256], x[:256] * 3)
    assert torch.equal(y[256:], x[256:] * 2)
    assert session.launches[-1].grid == (1, 1, 1)
    with pytest.raises(emulator.SessionError, match="no emulated"):
        fast(x, y.data_ptr(), 256, 3.0, fx.Stream(7))


def test_workgroups_interleave() -> None:
    number = 37
    flags, out = torch.zeros(number + 1, dtype=torch.int32), torch.full((number,), -1, dtype=torch.int32)
    flags[0] = 1
    with emulator.emulated(quantum=200, waves_per_group=4):
        kernels.relay()(flags.data_ptr(), out.data_ptr(), number)
    assert torch.equal(out, torch.arange(number, dtype=torch.int32))
    assert flags.tolist() == [1] * (number + 1)


def test_missing_flag_is_a_deadlock_that_says_who_waits() -> None:
    flags, out = torch.zeros(6, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    with emulator.emulated(quantum=200), pytest.raises(emulator.DeadlockError) as caught:
        kernels.relay()(flags.data_ptr(), out.data_ptr(), 5)
    assert any("spins at" in line and "workgroup" in line for line in caught.value.waiting)


def test_atomics_collide_in_order() -> None:
    rng = np.random.default_rng(5)
    data = rng.integers(0, 16, 1024, dtype=np.uint8)
    bins, ticket = np.zeros(16, np.int32), np.zeros(4, np.int32)
    seen = np.full(1024, -1, np.int32)
    with emulator.emulated() as session:
        for array in (data, bins, ticket, seen):
            session.register(array)
        kernels.histogram()(data.ctypes.data, bins.ctypes.data, ticket.ctypes.data, seen.ctypes.data, 4)
    assert np.array_equal(bins, np.bincount(data, minlength=16))
    for lane in range(4):
        assert sorted(seen[lane::4]) == list(range(256))


def test_hidden_arguments() -> None:
    x = torch.zeros(192)
    with emulator.emulated():
        kernels.grid_reader()(x, 3)
    assert torch.equal(x, torch.full((192,), 3.0))


def test_divergence_by_lane_wave_and_workgroup() -> None:
    out = torch.full((5 * 256,), -1, dtype=torch.int32)
    with emulator.emulated():
        kernels.diverge()(out.data_ptr(), 5)
    t = torch.arange(256)
    for block in range(5):
        n = t % 7
        wanted = n * (n - 1) // 2 + torch.where(t // 64 == 1, 100 * (block + 3), 0)
        assert torch.equal(out[block * 256 : (block + 1) * 256], wanted.int()), block


def test_buffer_range_check_drops_stores() -> None:
    x, y = torch.arange(1000, dtype=torch.float32), torch.full((1000,), -1.0)
    with emulator.emulated():
        kernels.buffer_copy()(x, y, 700, 4)
    assert torch.equal(y[:700], x[:700] + 1)
    assert torch.equal(y[700:], torch.full((300,), -1.0))


def test_out_of_bounds_names_the_lane_and_the_nearest_allocation() -> None:
    x, y = torch.arange(256, dtype=torch.float32), torch.zeros(100)
    with emulator.emulated(), pytest.raises(emulator.OutOfBoundsError) as caught:
        kernels.axpy()(x, y.data_ptr(), 256, 1.0)
    location = caught.value.location
    assert location.address == y.data_ptr() + 400
    assert (location.workgroup, location.wave, location.lane) == ((0, 0, 0), 1, 36)
    assert location.kernel == "test_axpy"
    assert "past the end" in str(caught.value)
    assert "global_store_dword" in str(caught.value)


def test_freed_tensor_is_use_after_free() -> None:
    x, y = torch.arange(256, dtype=torch.float32), torch.zeros(1 << 20)
    with emulator.emulated() as session:
        session.register(y)
        address = y.data_ptr()
        del y
        with pytest.raises(emulator.UseAfterFreeError):
            kernels.axpy()(x, address, 256, 1.0)


def test_backend_error_is_raised() -> None:
    with emulator.emulated(), pytest.raises(emulator.CompilerBackendError, match=r"libcall|error"):
        kernels.bad_tanh()(torch.zeros(64))


def test_compile_only_outside_then_launch_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernels.two_kernels.__wrapped__()
    listing = emulator.compile_to_assembly(run, torch.zeros(64), 1)
    assert "test_double:" in listing
    assert "test_increment:" in listing
    monkeypatch.setenv("COMPILE_ONLY", "1")
    x = torch.ones(64)
    with emulator.emulated() as session:
        run(x, 1)
    assert torch.equal(x, torch.full((64,), 3.0))
    assert len(session.launches) == 2
    assert os.environ["COMPILE_ONLY"] == "1"


def test_everything_is_restored_on_exit() -> None:
    from flydsl.compiler import jit_executor, jit_function  # noqa: PLC0415
    from flydsl.compiler.backends import _registry  # noqa: PLC0415

    def state() -> tuple[object, ...]:
        artifact = jit_executor.CompiledArtifact
        environment = {name: os.environ.get(name) for name in ENVIRONMENT}
        compile_method = jit_function.MlirCompiler.__dict__["compile"]
        return environment, _registry["rocm"], artifact._ensure_engine, artifact._get_func_exe, compile_method

    before = state()
    inside = []

    def leave_by_exception() -> None:
        with emulator.emulated():
            inside.extend([os.environ["ARCH"], state() != before])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_by_exception()
    assert inside == ["gfx950", True]
    assert state() == before
    assert emulator.active_session() is None


def test_sessions_do_not_nest_and_options_are_checked() -> None:
    with emulator.emulated(), pytest.raises(emulator.SessionError, match="do not nest"), emulator.emulated():
        pass
    for options in ({"mode": "exact"}, {"sanitize": "some"}, {"transcendental_ulp_bias": 2}, {"quantum": 0}):
        with pytest.raises(emulator.SessionError), emulator.emulated(**options):
            pass


def test_launches_from_several_threads() -> None:
    run = kernels.axpy()
    x = torch.arange(300, dtype=torch.float32)
    outputs = [torch.full((300,), POISON) for _ in range(4)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            run(x, outputs[index].data_ptr(), 300, float(index))
        except BaseException as error:
            errors.append(error)

    with emulator.emulated() as session:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert len(session.launches) == 4
    for index, out in enumerate(outputs):
        assert torch.equal(out, x * index)
