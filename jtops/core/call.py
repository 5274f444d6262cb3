"""triton_call: a Triton kernel as a JAX operation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtops.core.launch import keywords
from jtops.core.launch.request import GridOrFn, Request
from jtops.core.launch.vmap import GridBatch
from jtops.core.mesh import sharded
from jtops.core.mesh.sharded import ShardingRule
from jtops.core.target import Target


def triton_call(
    *args: Any,
    kernel: Any,
    out_type: Any = None,
    grid: GridOrFn | None = None,
    name: str = "",
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int | None = None,
    cluster_size: int | None = None,
    compute_capability: int | str | Target | None = None,
    backend_options: Mapping[str, Any] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    zeroed_outputs: Sequence[int] | Callable[[dict[str, Any]], Sequence[int]] = (),
    interpret: bool | None = None,
    debug: bool = False,
    has_side_effect: bool = False,
    cost_estimate: Mapping[str, int] | None = None,
    serialized_metadata: bytes = b"",
    vmap_method: str | GridBatch | None = None,
    sharding_rule: ShardingRule | None = None,
    **kwargs: Any,
) -> Any:
    """Call a Triton kernel with JAX arrays; works under ``jax.jit``, in ``shard_map`` and in scans.

    Positional arguments bind to the kernel's parameters in order, skipping those given by keyword. The pointer parameters
    that remain are the outputs, one per leaf of `out_type`, in order; constexpr parameters that remain take their defaults. A
    `TensorDescriptor` in an array's place is read or written by TMA.

    A kernel changes an array in place in two ways: a ``jax.new_ref`` operand is read and written through its pointer, and so is an
    operand that `input_output_aliases` gives to an output. Without donation (``jax.jit(..., donate_argnames=...)``) XLA
    copies the operand first, so that the caller's array stays as it was.

    Args:
      *args: arrays and Refs (passed as pointers, row-major, 16-byte aligned), numbers (baked into the launch), constexpr values,
        and tuples of these, which the kernel gets as tuples, and NamedTuples with their fields. In a tuple a ``tl.constexpr``, a
        boolean, a string and None are constants.
      kernel: a ``@triton.jit`` or ``@gluon.jit`` function, or one under ``@triton.autotune`` or ``@triton.heuristics``: then one
        config is settled while tracing (`jtops.core.tuning.settle`); what the call itself gives overrules both.
      out_type: pytree whose leaves have ``.shape`` and ``.dtype``, or are a `TensorDescriptor` over such; the result has the same
        structure. The leaves of a dict come in the order of its sorted keys, as always in JAX: so must the kernel's outputs.
      grid: number of programs: an int, up to three ints, or a function from a dict of the kernel's numbers and constants
        to those. A grid with a zero launches nothing and returns zeros.
      name: name of the launch in profiles. Default: the kernel's.
      num_warps, num_stages, num_ctas: as for ``triton.jit`` launches; None takes Triton's default for the target.
      cluster_size: number of neighbouring programs along the grid's first axis that run together, as a thread block cluster, and
        can reach each other's shared memory by inline assembly; from sm_90 on, at most 8. (With num_ctas, a cluster is one
        program.)
      compute_capability: GPU to compile for where it is not the device itself: 90, "sm_90", "gfx942".
      backend_options: further options of Triton's compiler by name, such as ``enable_fp_fusion`` or ``maxnreg``.
      input_output_aliases: ``{operand: output}``: that output is that operand, changed by the kernel through the operand's pointer;
        it has no parameter of its own. Operands are counted over the parameters that are not constexpr, tuples flattened,
        numbers included; outputs over the leaves of `out_type`. Refs cannot be given beside it.
      zeroed_outputs: indices of outputs to set to zero before each launch, aliased ones included; or a function from a dict as for
        `grid` to those.
      interpret: run the kernel with NumPy on the host. None: if ``jtops.config.implementation`` says so.
      debug: print the kernel's intermediate texts and machine code whenever it is lowered, keep them in files (see
        ``jtops.core.compile.dump``), and compile its ``tl.device_assert``.
      has_side_effect: keep the call even if its results are unused.
      cost_estimate: ``{"flops": ..., "bytes_accessed": ...}`` for profilers.
      serialized_metadata: opaque bytes kept in the launch record.
      vmap_method: what ``jax.vmap`` makes of the call: "sequential", a loop of launches as in ``jax.lax.map``; a `GridBatch`, one
        launch with the batch as a grid axis; None, an error.
      sharding_rule: which axes of the arrays are which and what devices may share out (`ShardingRule`): the call then works on
        sharded arrays, each device launching for its part. `out_type` stays that of the whole call; an argument that depends on
        a shape is a function of a dict of the axes' sizes, and so must `grid` be, whose dict has them too: with a rule
        ``"rows n -> rows n"``, ``n=lambda axes: axes["n"], grid=lambda meta: meta["rows"]``. See `sharded_call` for more.
      **kwargs: arguments by parameter name. Names that older bridges gave these arguments work, too (`jtops.core.legacy`).

    Returns:
      Arrays in the structure of `out_type`.

    Raises:
      TypeError: unknown, missing or surplus argument; a dtype Triton lacks; an unhashable constant; not a kernel.
      ValueError: malformed grid; `out_type` does not match the kernel's remaining pointers; integer beyond 64 bits; aliases that
        are no bijection, or of arrays that differ in shape or dtype.
      KernelCompileError: the kernel does not compile for the target, or needs more shared memory than it has.
      UnsupportedError: lowered for a platform without Triton kernels; differentiated or vmapped without a rule of its own.
    """
    request = Request(
        args=args,
        kwargs=kwargs,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        name=name,
        num_warps=num_warps,
        num_stages=num_stages,
        num_ctas=num_ctas,
        cluster_size=cluster_size,
        compute_capability=compute_capability,
        backend_options=backend_options,
        input_output_aliases=input_output_aliases,
        zeroed_outputs=zeroed_outputs,
        interpret=interpret,
        debug=debug,
        has_side_effect=has_side_effect,
        cost_estimate=cost_estimate,
        serialized_metadata=serialized_metadata,
        vmap_method=vmap_method,
        sharding_rule=sharding_rule,
    )
    return sharded.launch(keywords.renamed(request))
