"""The learning rates that modules ask for: those of covariances and temperatures differ from that of the model."""

import math

from flax import nnx

from lit_het import parameters
from lit_het.types import Params


def learning_rate_factors(model: nnx.Module) -> Params:
    """Returns what multiplies the learning rate of each parameter of a model, a tree of numbers.

    The tree is that of ``nnx.to_pure_dict(nnx.state(model))``; a parameter has the product of the attributes
    ``learning_rate_factor`` of the modules that contain it. `CovarianceConfig.scaled_learning_rate` has the reason.

    Args:
        model: a head, or a module that contains one; its arrays may be shapes.
    """
    found = {
        "".join(f"{part}/" for part in path): getattr(module, "learning_rate_factor", 1.0)
        for path, module in nnx.iter_modules(model)
    }
    return parameters.unflatten(
        {
            path: math.prod(factor for prefix, factor in found.items() if path.startswith(prefix))
            for path in parameters.flatten(nnx.to_pure_dict(nnx.state(model)))
        }
    )
