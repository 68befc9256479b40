# SPDX-License-Identifier: Apache-2.0
"""FlyDSL's own compile and launch path, ended in the emulator instead of HIP.

What stays FlyDSL's: tracing, lowering, LLVM code generation, argument packing, the host function
(JIT-compiled by MLIR's ExecutionEngine).  What changes, and only while a session is active:

* a compile backend, registered under the name `rocm` through FlyDSL's public registry, whose pipeline ends in
  assembly text (`format=isa`) instead of a linked code object;
* the host function's runtime symbols (`mgpuModuleLoadJIT`, `mgpuLaunchKernel`, ...), which normally come from
  a library that needs HIP, are Python callbacks: the launch arrives here with grid, block, LDS size, stream
  and raw arguments;
* LLVM back-end errors, which FlyDSL leaves on file descriptor 2, are read and raised as CompilerBackendError;
* FlyDSL's disk cache is off, so that no listing lands among a GPU's code objects.

The environment, the backend and the patched methods are process-wide and are restored on exit.  Engines made
in a session stay usable in later sessions; calling one with no session active raises SessionError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kernellib.emulator.errors import CompilerBackendError, SessionError

ENVIRONMENT: dict[str, str | None] = {
    "ARCH": "gfx950", "FLYDSL_GPU_ARCH": "gfx950",
    "FLYDSL_COMPILE_BACKEND": "rocm", "FLYDSL_RUNTIME_KIND": "rocm",
    "FLYDSL_RUNTIME_ENABLE_CACHE": "0", "FLYDSL_RUNTIME_RUN_ONLY": None, "COMPILE_ONLY": None,
    "HSA_OVERRIDE_GFX_VERSION": None,
    # line tables: findings and profiles name the Python line; the instructions are the same with and without
    "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1",
}  # fmt: skip

_V, _I = ctypes.c_void_p, ctypes.c_int64
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mgpuModuleLoad": (_V, (_V, ctypes.c_uint64)),
    "mgpuModuleLoadJIT": (_V, (_V, ctypes.c_int32)),
    "mgpuModuleUnload": (None, (_V,)),
    "mgpuModuleGetFunction": (_V, (_V, ctypes.c_char_p)),
    "mgpuLaunchKernel": (
        None,
        (_V, _I, _I, _I, _I, _I, _I, ctypes.c_int32, _V, ctypes.POINTER(_V), _V, ctypes.c_uint64),
    ),
    "mgpuStreamCreate": (_V, ()),
    "mgpuStreamDestroy": (None, (_V,)),
    "mgpuStreamSynchronize": (None, (_V,)),
    "mgpuStreamWaitEvent": (None, (_V, _V)),
    "mgpuEventCreate": (_V, ()),
    "mgpuEventDestroy": (None, (_V,)),
    "mgpuEventRecord": (None, (_V, _V)),
    "mgpuEventSynchronize": (None, (_V,)),
}


class LaunchTarget(Protocol):
    """Who receives launches (a Session)."""

    def register(self, buffer: Any) -> Any:
        """Make a tensor's memory addressable."""

    def launch_from_host(
        self,
        assembly: str,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        dynamic_lds_bytes: int,
        stream: int,
        pointers: Any,
        num_pointers: int,
    ) -> None:
        """Run one kernel; `pointers[i]` is the address of the i-th argument's value."""


class HostRuntime:
    """The `mgpu*` symbols.  One per process; it forwards launches to the active session."""

    def __init__(self) -> None:
        self.target: LaunchTarget | None = None
        self._modules: dict[int, str | bytes] = {}
        self._functions: dict[int, tuple[int, str]] = {}
        self._next = 0x1000
        self._lock = threading.Lock()
        self._local = threading.local()
        self._engines: list[Any] = []
        self.callbacks = {
            name: ctypes.CFUNCTYPE(result, *arguments)(self._guarded(name, result))
            for name, (result, arguments) in _PROTOTYPES.items()
        }

    def _guarded(self, name: str, result: Any) -> Callable[..., Any]:
        """ctypes prints and drops exceptions of callbacks: keep the first one for `check`."""
        method = getattr(self, "_" + name, None)

        def call(*args: Any) -> Any:
            if getattr(self._local, "error", None) is not None:
                return 0 if result is not None else None
            try:
                if method is None:
                    return self._handle() if result is not None else None
                return method(*args)
            except BaseException as error:
                self._local.error = error
                return 0 if result is not None else None

        return call

    def check(self) -> None:
        """Raise the first error of a callback on this thread."""
        error, self._local.error = getattr(self._local, "error", None), None
        if error is not None:
            raise error

    def _handle(self) -> int:
        with self._lock:
            self._next += 16
            return self._next

    def _mgpuModuleLoad(self, data: int, size: int) -> int:
        handle = self._handle()
        self._modules[handle] = ctypes.string_at(data, size)
        return handle

    def _mgpuModuleLoadJIT(self, data: int, level: int) -> int:
        handle = self._handle()
        self._modules[handle] = ctypes.string_at(data).decode()
        return handle

    def _mgpuModuleGetFunction(self, module: int, name: bytes) -> int:
        handle = self._handle()
        self._functions[handle] = (module, name.decode())
        return handle

    def _mgpuLaunchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, lds: int,
        stream: int | None, params: Any, extra: Any, count: int,
    ) -> None:  # fmt: skip
        if self.target is None:
            raise SessionError(
                "a launcher compiled for the emulator was called with no emulated() session active"
            )
        module, name = self._functions[function]
        blob = self._modules[module]
        if not isinstance(blob, str):
            raise SessionError(
                f"kernel {name} was compiled to a code object outside the session: call the launcher (or "
                "flyc.compile) again inside emulated()"
            )
        if extra:
            raise SessionError("launch arguments in the `extra` form are not supported")
        self.target.launch_from_host(blob, name, (gx, gy, gz), (bx, by, bz), lds, stream or 0, params, count)

    def attach(self, engine: Any) -> None:
        """Register the symbols with an execution engine, before it is initialised."""
        for name, callback in self.callbacks.items():
            engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))
        # Never destroyed: the module destructor would call back into Python at interpreter shutdown.
        self._engines.append(engine)


HOST = HostRuntime()


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Collect what native code writes to file descriptor 2; what is no error is passed on afterwards."""
    collected: list[str] = []
    sys.stderr.flush()
    keep = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield collected
        finally:
            sys.stderr.flush()
            os.dup2(keep, 2)
            os.close(keep)
            file.seek(0)
            collected.append(file.read().decode(errors="replace"))


_compile_lock = threading.RLock()


def _patched_compile(original: Any) -> Any:
    """MlirCompiler.compile that turns back-end messages into an exception."""

    def compile_checked(cls: Any, asm: str, *, func_name: str, config: Any) -> Any:
        with _compile_lock:
            with captured_stderr() as collected:
                module = original.__func__(cls, asm, func_name=func_name, config=config)
            text = collected[0].strip()
        if "error:" in text or "LLVM ERROR" in text:
            raise CompilerBackendError(f"LLVM failed on the kernels of {func_name}: {text[:4000]}")
        if text:
            print(text, file=sys.stderr)
        return module

    return classmethod(compile_checked)


def _ensure_engine(self: Any) -> None:
    """CompiledArtifact._ensure_engine without the HIP runtime library."""
    from flydsl._mlir import ir  # noqa: PLC0415 (FlyDSL is imported when it is used)
    from flydsl._mlir.execution_engine import ExecutionEngine  # noqa: PLC0415
    from flydsl.compiler.jit_function import _create_mlir_context  # noqa: PLC0415

    with self._lock:
        if self._engine is not None:
            return
        if self._uses_explicit_module:
            raise SessionError(
                "kernels that link external bitcode with module initialisers are not supported here"
            )
        context = _create_mlir_context()
        with context:
            module = ir.Module.parse(self._ir_text)
            engine = ExecutionEngine(module, opt_level=3, shared_libs=[])
            HOST.attach(engine)
            engine.initialize()
        HOST.check()
        self._module, self._engine, self._jit_module, self._ctx = module, engine, None, context
        self._kernellib_engine = True


def _patched_func_exe(original: Any) -> Any:
    """CompiledArtifact._get_func_exe whose result re-raises errors of the callbacks, for good."""

    def get(self: Any) -> Any:
        if self._func_exe is None:
            raw = original(self)
            if not getattr(self, "_kernellib_engine", False):
                return raw

            def call(packed: Any) -> None:
                raw(packed)
                HOST.check()

            self._func_exe = call
        return self._func_exe

    return get


def _patched_trace(original: Any) -> Any:
    """JitFunction._trace, one thread at a time: FlyDSL infers dynamic LDS sizes through shared state."""

    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _compile_lock:
            return original(self, *args, **kwargs)

    return trace


def _patched_call(original: Any) -> Any:
    """CallState.__call__ that tells the session about tensor arguments; others are found when used."""

    def call(self: Any, args: tuple[Any, ...]) -> Any:
        if HOST.target is not None:
            for value in args:
                tensor = getattr(value, "torch_tensor", value)
                if hasattr(tensor, "untyped_storage"):
                    HOST.target.register(tensor)
        return original(self, args)

    return call


def _live_cpu_tensors(jit_function: Any) -> dict[str, Any]:
    """CPU tensors are the emulated device's memory: `flyc.compile` launches with them as it does on a GPU."""
    tensor_type = jit_function.TorchTensorJitArg
    live, placeholder = jit_function._has_live_device_argument, jit_function._is_compile_placeholder

    def has_live_device_argument(value: Any) -> bool:
        if isinstance(value, tensor_type):
            return bool(value.torch_tensor.device.type == "cpu")
        return bool(live(value))

    def is_compile_placeholder(value: Any, **options: Any) -> bool:
        if isinstance(value, tensor_type) and value.torch_tensor.device.type == "cpu":
            return False
        return bool(placeholder(value, **options))

    return {
        "_has_live_device_argument": has_live_device_argument,
        "_is_compile_placeholder": is_compile_placeholder,
    }


@contextlib.contextmanager
def _patched(owner: Any, replacements: dict[str, Any]) -> Iterator[None]:
    """Replace attributes for a while."""
    saved = {name: owner.__dict__[name] for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in ENVIRONMENT}
    for name, value in ENVIRONMENT.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_depth = 0


@contextlib.contextmanager
def assembly_backend() -> Iterator[None]:
    """While active, FlyDSL compiles gfx950 kernels to assembly text and launches reach `HOST.target`.

    Re-entrant: only the outermost use patches and restores.
    """
    global _depth  # noqa: PLW0603 (process-wide state, like the environment it mirrors)
    import flydsl.compiler.backends as registry  # noqa: PLC0415
    from flydsl.compiler import jit_executor, jit_function  # noqa: PLC0415
    from flydsl.compiler.backends.rocm import RocmBackend  # noqa: PLC0415

    with _compile_lock:
        _depth += 1
        outermost = _depth == 1
    if not outermost:
        try:
            yield
        finally:
            _depth -= 1
        return

    class AssemblyBackend(RocmBackend):  # type: ignore[misc]
        """The ROCm pipeline, ending in assembly text."""

        def _pipeline_parts(self, *, compile_hints: dict[str, Any]) -> tuple[list[str], str]:
            before, binary = super()._pipeline_parts(compile_hints=compile_hints)
            if "format=fatbin" not in binary:
                raise SessionError(f"FlyDSL's pipeline ends in {binary!r}: this version is not supported")
            return before, binary.replace("format=fatbin", "format=isa")

        def hash(self) -> str:
            return f"{super().hash()} assembly"

    artifact, compiler = jit_executor.CompiledArtifact, jit_function.MlirCompiler
    launcher = jit_function.JitFunction
    saved_backend = registry._registry.get("rocm")
    patches: list[tuple[Any, dict[str, Any]]] = [
        (
            artifact,
            {"_ensure_engine": _ensure_engine, "_get_func_exe": _patched_func_exe(artifact._get_func_exe)},
        ),
        (compiler, {"compile": _patched_compile(compiler.__dict__["compile"])}),
        (launcher, {"_trace": _patched_trace(launcher._trace)}),
        (jit_executor.CallState, {"__call__": _patched_call(jit_executor.CallState.__call__)}),
        (jit_function, _live_cpu_tensors(jit_function)),
    ]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment())
            for owner, replacements in patches:
                stack.enter_context(_patched(owner, replacements))
            registry.register_backend("rocm", AssemblyBackend, force=True)
            registry._make_backend.cache_clear()
            yield
    finally:
        if saved_backend is not None:
            registry.register_backend("rocm", saved_backend, force=True)
        registry._make_backend.cache_clear()
        _depth -= 1


def artifact_assembly(artifact: Any) -> str:
    """Assembly text inside a CompiledArtifact made by the assembly backend."""
    from flydsl._mlir import ir  # noqa: PLC0415
    from flydsl._mlir.dialects import gpu  # noqa: PLC0415
    from flydsl.compiler.jit_function import _create_mlir_context  # noqa: PLC0415

    found: list[str] = []

    def visit(op: Any) -> Any:
        if op.name == "gpu.binary":
            for item in ir.ArrayAttr(op.attributes["objects"]):
                data = gpu.ObjectAttr(item).object
                found.append(data.decode() if isinstance(data, bytes) else data)
        return ir.WalkResult.ADVANCE

    with _create_mlir_context():
        ir.Module.parse(artifact.ir).operation.walk(visit)
    if not found:
        raise CompilerBackendError("the launcher compiled to no GPU code at all")
    return "\n".join(found)


def compile_to_assembly(launcher: Any, *args: Any, **kwargs: Any) -> str:
    """gfx950 listing of every kernel that a `@flyc.jit` launcher launches; nothing is executed.

    Args:
        launcher: the `@flyc.jit` function.
        *args, **kwargs: call arguments as for a launch (addresses may be 0).
    Raises:
        CompilerBackendError when LLVM reports an error.
    """
    if not hasattr(launcher, "_compile_only"):
        raise TypeError(f"compile_to_assembly wants a @flyc.jit function, got {type(launcher).__name__}")
    with assembly_backend():
        launcher._compile_only(*args, **kwargs)
        return artifact_assembly(launcher._last_compiled[1])
