"""Programs that several tests look into."""

import jax

import jtops


def nested(last):
    """Ops below jit, scan, cond, a custom rule and, of two arrays, `last` below remat."""

    @jax.jit
    def program(x):
        @jax.custom_vjp
        def custom(x):
            return jtops.layer_norm(x)

        custom.defvjp(lambda x: (custom(x), x), lambda x, g: (g * x,))
        x = jax.lax.scan(lambda c, _: (jtops.softmax(c), None), x, None, length=3)[0]
        x = jax.lax.cond(x[0, 0] > 0, jtops.rms_norm, lambda x: x, x)
        return jax.checkpoint(last)(custom(x), x).sum()

    return program
