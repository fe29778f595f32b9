"""ONNX files of pure JAX functions, which onnxruntime and other programs run without JAX."""
