"""Tasks combine towers, a head and a loss into one differentiable function of parameters and a batch."""
