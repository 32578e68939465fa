"""The kernels, one module per kind. A body is called as body(settings, context, count) while its kernel is traced."""
