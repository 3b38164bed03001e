"""The ONNX side of dsimg: sessions, int8, measurements. Never torch."""
