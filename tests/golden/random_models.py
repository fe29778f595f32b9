"""Random weights for models that are recorded; imports nothing of lit-het, for environments without it."""

CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def randomise(torch, model):
    """Redraws every parameter, including zeros and ones."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()
