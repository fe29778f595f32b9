"""The law by which the shape of a model grows with compute (Alabdulmohsin et al. 2023, SoViT): functions of arrays."""
