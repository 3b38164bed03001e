"""dsimg: DeepSpeed-powered scaling and compression for image classifiers."""

__version__ = "0.1.0"
