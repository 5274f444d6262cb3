"""The launch of a kernel as it is: its arguments are bound, and the call is made."""

from typing import Any

from jtops import config
from jtops._compat import triton as triton_compat
from jtops.core import notes
from jtops.core.launch import inplace, vmap
from jtops.core.launch.binding import bind, called_grid, check_keywords, normalize_grid, out_array
from jtops.core.launch.options import launch_options
from jtops.core.launch.primitive import bind_call
from jtops.core.launch.record import KernelCall
from jtops.core.launch.request import OPTIONS, Request
from jtops.core.target import Target, requested
from jtops.core.types import Constexpr, Scalar
from jtops.errors import UnsupportedError


def launch(request: Request) -> Any:
    """Launch a ``@triton.jit`` or ``@gluon.jit`` function; return arrays in the structure of ``request.out_type``."""
    kernel = triton_compat.kernel_function(request.kernel)
    if request.interpreted() and triton_compat.is_gluon(kernel):
        raise UnsupportedError(f"kernel {kernel.__name__}: Gluon kernels have no interpreter; run it on a GPU.")
    check_keywords(kernel, request.kwargs, OPTIONS, out_type=request.out_type, grid=request.grid)
    options = launch_options(
        kernel,
        num_warps=request.num_warps,
        num_stages=request.num_stages,
        num_ctas=request.num_ctas,
        cluster_size=request.cluster_size,
        backend_options=request.backend_options,
        debug=request.debug,
    )
    leaves, tree = request.results()
    outs = tuple(out_array(kernel, leaf) for leaf in leaves)
    wanted = inplace.checked_aliases(kernel, request.input_output_aliases, outs, (request.args, request.kwargs))
    kwargs = vmap.with_strides(kernel, request.vmap_method, request.kwargs)
    bound, arrays, aliases = bind(kernel, request.args, kwargs, options, leaves, wanted)
    meta = {n: p.value for n, p in bound if isinstance(p, Scalar | Constexpr)} | dict(options)
    grid = normalize_grid(called_grid(request.grid, meta, kernel) if callable(request.grid) else request.grid, kernel.__name__)
    zeroed = inplace.zeroed_indices(kernel, request.zeroed_outputs, meta, outs)
    vmap.check(kernel, request.vmap_method, bound, aliases, grid)
    if grid[0] % (cluster := dict(options).get("cluster_size", 1)):
        raise ValueError(
            f"kernel {kernel.__name__}: a grid of {grid} does not split into clusters of {cluster} along its first axis."
        )
    if 0 in grid:
        return tree.unflatten(inplace.without_launch(outs, aliases, zeroed, arrays))
    call = KernelCall(
        kernel=kernel,
        bound=bound,
        grid=grid,
        out_types=outs,
        name=request.name or kernel.__name__,
        options=options,
        target=requested() if request.compute_capability is None else Target.parse(request.compute_capability),
        interpret=request.interpreted(),
        has_side_effect=request.has_side_effect,
        cost=None if request.cost_estimate is None else tuple(sorted(request.cost_estimate.items())),
        metadata=request.serialized_metadata,
        aliases=aliases,
        zeroed=zeroed,
        launch=config.launch.value,
        vmap_method=request.vmap_method,
        origin=notes.origin(),
    )
    return tree.unflatten(bind_call(arrays, call))
