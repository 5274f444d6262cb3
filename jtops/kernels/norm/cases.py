"""The SPECs of the norms."""

from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal
from jtops.kernels.norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_TILES, _BLOCKS, _SPLIT = (Config(BLOCK_M=2, BLOCK_N=n, PROGRAMS=p) for n, p in ((8, 4), (64, 4), (64, 32)))


def _rows(names, *shape, mean=0.0, std=1.0):
    """The inputs: x, and those of residual, scale and bias that are named."""
    found = {"x": normal(shape, mean, std)}
    return found | {name: normal(shape if name == "residual" else shape[-1:]) for name in names.split()}


def _models(names):
    """Rows of models' widths."""
    return tuple(Case(f"width_{n}", _rows(names, 8192, n), f"a model's width: {n}") for n in (4096, 8192, 5120, 2048))


def _size(operands) -> int:
    """The bytes of the parameters."""
    return sum(p.nbytes for name, p in operands.items() if name in ("scale", "bias"))


LAYER_NORM = Spec(
    name="layer_norm",
    function=layer_norm,
    small=(Case("small", _rows("scale bias", 2, 3, 8), "all operands", axes="b m n, n, n -> b m n"),),
    meshed=(
        Meshed(
            "meshed",
            _rows("scale bias", 8, 8, 8),
            "rows on many devices, parameters on all",
            axes="b m n, n, n -> b m n",
            split="b m",
            gathered="n",
        ),
    ),
    cases=(
        Case("full", _rows("scale bias", 3, 5, 257), "rows and columns that fill no block"),
        Case("bare", _rows("", 7, 48), "no parameters"),
        Case("scale", _rows("scale", 7, 48), "scale alone"),
        Case("bias", _rows("bias", 7, 48), "bias alone"),
        Case("vector", _rows("scale bias", 1000), "no batch axis"),
        Case("one", _rows("scale bias", 5, 1), "a row of one element: bias, and gradient 0"),
        Case("offset", _rows("scale bias", 7, 48), "scale stored around zero", {"scale_offset": 1.0}),
        Case("epsilon", _rows("scale", 7, 48, std=1e-2), "epsilon as large as the variance", {"epsilon": 1e-4}),
        Case("mean", _rows("scale", 5, 96, mean=100.0), "mean far above the spread"),
        Case("parts", _rows("scale bias", 520, 6), "parameter gradients summed in several parts"),
        Case("tiles", _rows("scale bias", 37, 6), "several tiles a program", config=_TILES),
        Case("blocks", _rows("scale bias", 5, 300), "rows longer than a block", config=_BLOCKS),
        Case("tail", _rows("scale bias", 5, 70), "rows a little longer than a block", config=_BLOCKS),
        Case("split", _rows("scale bias", 5, 300), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(
        Case("short", _rows("scale bias", 65536, 256), "short rows"),
        Case("middle", _rows("scale bias", 8192, 4096), "transformer width"),
        Case("bare", _rows("", 8192, 4096), "no parameters"),
        Case("long", _rows("scale bias", 64, 131072), "several blocks a row"),
    ),
    backward_kernels=1,
    kept=1,
    forward_bytes=lambda y, x, **parameters: 2 * x.nbytes + _size(parameters),
    backward_bytes=lambda y, x, **parameters: 3 * x.nbytes + _size(parameters),
    model=True,
)
RMS_NORM = Spec(
    name="rms_norm",
    function=rms_norm,
    small=(Case("small", _rows("scale", 2, 3, 8), "all operands", axes="b m n, n -> b m n"),),
    meshed=(
        Meshed(
            "meshed",
            _rows("scale", 8, 8, 8),
            "rows on many devices, scale on all",
            axes="b m n, n -> b m n",
            split="b m",
            gathered="n",
        ),
    ),
    cases=(
        Case("full", _rows("scale", 3, 5, 257), "rows and columns that fill no block"),
        Case("bare", _rows("", 7, 48), "no scale"),
        Case("vector", _rows("scale", 1000), "no batch axis"),
        Case("one", _rows("scale", 5, 1), "a row of one element", {"epsilon": 0.5}),
        Case("offset", _rows("scale", 7, 48), "scale stored around zero", {"scale_offset": 1.0}),
        Case("epsilon", _rows("scale", 7, 48, std=1e-2), "epsilon as large as the mean square", {"epsilon": 1e-4}),
        Case("parts", _rows("scale", 520, 6), "the gradient of scale summed in several parts"),
        Case("tiles", _rows("scale", 37, 6), "several tiles a program", config=_TILES),
        Case("blocks", _rows("scale", 5, 300), "rows longer than a block", config=_BLOCKS),
        Case("split", _rows("scale", 5, 300), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(
        Case("short", _rows("scale", 65536, 256), "short rows"),
        Case("middle", _rows("scale", 8192, 4096), "transformer width"),
        Case("long", _rows("scale", 64, 131072), "several blocks a row"),
    ),
    tuned=_models("scale"),
    backward_kernels=1,
    kept=1,
    forward_bytes=LAYER_NORM.forward_bytes,
    backward_bytes=LAYER_NORM.backward_bytes,
    alike="layer_norm",
)
ADD_LAYER_NORM = Spec(
    name="add_layer_norm",
    function=add_layer_norm,
    small=(Case("small", _rows("residual scale bias", 2, 3, 8), "all operands", axes="b m n, b m n, n, n -> b m n"),),
    meshed=(
        Meshed(
            "meshed",
            _rows("residual scale bias", 8, 8, 8),
            "rows on many devices",
            axes="b m n, b m n, n, n -> b m n",
            split="b m",
            gathered="n",
        ),
    ),
    cases=(
        Case("full", _rows("residual scale bias", 3, 5, 257), "rows and columns that fill no block"),
        Case("bare", {"x": normal((7, 48)), "residual": normal((7, 48), mean=3.0)}, "no parameters"),
        Case("blocks", _rows("residual scale bias", 5, 300), "rows longer than a block", config=_BLOCKS),
        Case("split", _rows("residual scale bias", 5, 300), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(
        Case("middle", _rows("residual scale bias", 8192, 4096), "transformer width"),
        Case("long", _rows("residual scale bias", 64, 131072), "several blocks a row"),
    ),
    backward_kernels=1,
    kept=1,
    forward_bytes=lambda out, x, residual, **p: x.nbytes + residual.nbytes + sum(o.nbytes for o in out) + _size(p),
    backward_bytes=lambda out, x, residual, **p: 4 * out[1].nbytes + 2 * _size(p),
)
ADD_RMS_NORM = Spec(
    name="add_rms_norm",
    function=add_rms_norm,
    small=(Case("small", _rows("residual scale", 2, 3, 8), "all operands", axes="b m n, b m n, n -> b m n"),),
    meshed=(
        Meshed(
            "meshed",
            _rows("residual scale", 8, 8, 8),
            "rows on many devices, scale on all",
            axes="b m n, b m n, n -> b m n",
            split="b m",
            gathered="n",
        ),
    ),
    cases=(
        Case("full", _rows("residual scale", 3, 5, 257), "rows and columns that fill no block"),
        Case("bare", _rows("residual", 7, 48), "no scale"),
        Case("blocks", _rows("residual scale", 5, 300), "rows longer than a block", config=_BLOCKS),
        Case("split", _rows("residual scale", 5, 300), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(Case("middle", _rows("residual scale", 8192, 4096), "transformer width"),),
    tuned=_models("residual scale"),
    backward_kernels=1,
    kept=1,
    forward_bytes=ADD_LAYER_NORM.forward_bytes,
    backward_bytes=ADD_LAYER_NORM.backward_bytes,
    alike="add_layer_norm",
)
