"""The ONNX side of dsimg: sessions, int8, measurements, serving. Never torch."""

import os

# Otherwise ONNX Runtime keeps a device id and a list of events in the user's cache, to send them to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
