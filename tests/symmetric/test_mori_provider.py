# SPDX-License-Identifier: Apache-2.0
"""The mori provider's calls, held to the published wheel's signatures; and what it does with the answers."""

from __future__ import annotations

import ast
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernellib.symmetric import (
    HeapProtocolError,
    ProviderUnavailableError,
    SymmetricHeap,
    SymmetricMemoryError,
    mori_provider,
)
from kernellib.symmetric.mori_provider import MoriProvider
from tests.symmetric import read_mori_wheel
from tests.symmetric.fake_mori import SIGNATURES, FakeMori, signature

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def shmem_functions(**changed: Any) -> dict[str, Any]:
    """Behaviour of one rank's mori.shmem on host memory."""
    memory: dict[int, Any] = {}

    def malloc(alignment: int, size: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * (size + alignment), size + alignment)
        address = -(-ctypes.addressof(block) // alignment) * alignment
        memory[address] = block
        return address

    found = {
        "shmem_torch_process_group_init": lambda group_name: 0,
        "shmem_mype": lambda: 0,
        "shmem_npes": lambda: 1,
        "shmem_malloc_align": malloc,
        "shmem_free": lambda ptr: memory.pop(ptr) and None,
        "shmem_ptr_p2p": lambda dest_ptr, my_pe, dest_pe: dest_ptr,
        "shmem_barrier_all": lambda: None,
        "shmem_finalize": lambda: 0,
    }
    return {**found, **changed}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_heap_runs_on_the_wheels_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMori(shmem_functions()).install(monkeypatch)
    heap = SymmetricHeap(MoriProvider(device=CPU))
    assert (heap.rank, heap.num_ranks, heap.target, heap.provider_name) == (0, 1, "mi355x", "mori")
    region = heap.allocate("rows", 1000)
    assert region.peers.tolist() == [region.memory.data_ptr()]
    assert region.memory.shape == (1000,)
    assert region.memory.data_ptr() % 256 == 0
    region.memory.zero_()
    assert heap.exchange("tokens", 5) == [5]
    heap.barrier()
    heap.close()
    assert dict(fake.calls)["shmem_torch_process_group_init"]["group_name"] == dist.group.WORLD.group_name
    assert fake.names() == [
        "shmem_torch_process_group_init",
        "shmem_mype",
        "shmem_npes",
        "shmem_malloc_align",
        "shmem_barrier_all",  # of the caller
        "shmem_barrier_all",  # before freeing
        "shmem_free",
        "shmem_finalize",
    ]


@pytest.mark.usefixtures("group")
def test_the_group_is_known_under_the_name_that_mori_looks_up() -> None:
    # mori resolves the name with torch's own table of groups
    name = dist.group.WORLD.group_name
    assert dist.distributed_c10d._resolve_process_group(name) is dist.group.WORLD


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"shmem_torch_process_group_init": lambda group_name: 3}, "returned 3, wanted 0"),
        ({"shmem_mype": lambda: 1}, "mori says rank 1 of 1"),
        ({"shmem_npes": lambda: 2}, "mori says rank 0 of 2"),
    ],
)
def test_a_start_that_went_wrong_is_refused(
    changed: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeMori(shmem_functions(**changed)).install(monkeypatch)
    with pytest.raises(ProviderUnavailableError, match=text):
        MoriProvider(device=CPU)


@pytest.mark.usefixtures("group")
def test_no_room_names_the_variable_that_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMori(shmem_functions(shmem_malloc_align=lambda alignment, size: 0)).install(monkeypatch)
    with pytest.raises(SymmetricMemoryError, match="MORI_SHMEM_HEAP_SIZE"):
        SymmetricHeap(MoriProvider(device=CPU)).allocate("rows", 1000)


@pytest.mark.usefixtures("group")
def test_a_failed_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMori(shmem_functions(shmem_finalize=lambda: 5)).install(monkeypatch)
    with pytest.raises(ProviderUnavailableError, match="shmem_finalize returned 5"):
        SymmetricHeap(MoriProvider(device=CPU)).close()


def test_without_a_process_group_or_mori_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ProviderUnavailableError, match="init_process_group"):
        MoriProvider(device=CPU)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setitem(sys.modules, "mori", None)
        with pytest.raises(ProviderUnavailableError, match=r"pip install amd-mori==1\.2\.4"):
            MoriProvider(device=CPU)
    finally:
        dist.destroy_process_group()


def test_a_call_that_the_wheel_does_not_have_fails_on_the_fake() -> None:
    fake = FakeMori(shmem_functions())
    shmem: Any = fake.modules["mori.shmem"]
    with pytest.raises(TypeError):
        shmem.shmem_malloc_align(align=256, size=4)
    with pytest.raises(TypeError):
        shmem.shmem_ptr_p2p(1, 0)
    with pytest.raises(AttributeError):
        shmem.shmem_calloc(4)


def calls_of(source: str, receivers: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Calls of an attribute of one of the named objects ("shmem", "self._shmem", ...)."""
    for node in ast.walk(ast.parse(source)):
        attribute = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if attribute and ast.unparse(node.func.value) in receivers:
            yield node.func.attr, node


def test_every_shmem_call_in_the_source_binds_to_the_wheels_signature() -> None:
    functions = SIGNATURES["modules"]["mori.shmem"]["functions"]
    seen = set()
    for name, call in calls_of(Path(mori_provider.__file__).read_text(), {"shmem", "self._shmem"}):
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        assert None not in arguments
        signature(functions[name]).bind(*call.args, **arguments)
        seen.add(name)
    assert seen == set(functions), "signatures recorded that nothing calls, or calls not recorded"


def test_the_recorded_version_is_the_pinned_one() -> None:
    assert SIGNATURES["version"] == read_mori_wheel.VERSION
    assert f"amd-mori=={SIGNATURES['version']}" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_recorded_signatures_are_the_published_wheels(tmp_path: Path) -> None:
    options = ["--no-deps", "--python-version", "3.12", "--only-binary=:all:"]
    platform = ["--platform", "manylinux_2_39_x86_64", "--dest", str(tmp_path)]
    wanted = f"amd-mori=={read_mori_wheel.VERSION}"
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, *platform, wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"pip cannot fetch {wanted} here: {fetched.stderr.strip()[-300:]}")
    [wheel] = tmp_path.glob("*.whl")
    assert read_mori_wheel.read_wheel(wheel) == json.loads(read_mori_wheel.DATA.read_text())


def _two_processes(rank: int, port: int, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    fake = FakeMori(shmem_functions(shmem_mype=lambda: rank, shmem_npes=lambda: 2))
    sys.modules.update(fake.modules)
    heap = SymmetricHeap(MoriProvider(device=CPU))
    values = heap.exchange("tokens", rank * 7)
    try:
        heap.exchange("call" if rank else "construct", 0)
    except HeapProtocolError as error:
        results.put((rank, values, str(error)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_exchange_over_gloo_and_share_an_error() -> None:
    context = torch.multiprocessing.get_context("spawn")
    probe = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    port = probe.port
    del probe
    results = context.Queue()
    processes = [context.Process(target=_two_processes, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    assert [values for _, values, _ in found] == [[0, 7], [0, 7]]
    assert found[0][2] == found[1][2]
    assert "rank 1: 'call'" in found[0][2]
