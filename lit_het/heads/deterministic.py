"""The deterministic classifier (HET-XL Eq. 1), whose head is `lit_het.heads.base.ClassificationHead`."""

from lit_het.heads.classification_config import DeterministicConfig as DeterministicConfig
