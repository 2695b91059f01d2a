"""Collectors of telemetry, good and bad, each a process: `python collectors.py KIND` prints its port first.

grpc: a real OTLP/gRPC receiver; prints every span's trace id and name, and refuses spans named `optimizer`.
partial: answers HTTP 200 and refuses two spans of every export. html: answers 200 with a web page. error: answers 503.
silent: takes connections and never answers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


@contextmanager
def collector(kind):
    """Start one; yields its base URL and a function that ends it and returns the lines it printed."""
    process = subprocess.Popen([sys.executable, str(Path(__file__)), kind], stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    lines = []

    def stop():
        process.terminate()
        lines.extend(process.communicate(timeout=1200)[0].splitlines())
        return lines

    try:
        yield f"http://127.0.0.1:{port}", stop
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=1200)


@contextmanager
def oteltap(folder):
    """Start the real OTLP/HTTP receiver; yields its base URL and the file that it writes received data to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "received.ndjson"
    command = [str(Path(sys.executable).with_name("oteltap"))]
    command = command if os.access(command[0], os.X_OK) else [sys.executable, "-m", "oteltap"]
    with path.open("w") as out:
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # else what it says stays with it
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + 100
        while not path.read_text():  # it says that it listens
            assert process.poll() is None and time.monotonic() < deadline, "oteltap did not start"
        yield f"http://127.0.0.1:{port}", path
    finally:
        process.kill()
        process.communicate(timeout=1200)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def serve_grpc():
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802
            answer = trace_service_pb2.ExportTraceServiceResponse()
            for resource in request.resource_spans:
                for span in resource.scope_spans[0].spans:
                    if span.name == "optimizer":
                        answer.partial_success.rejected_spans += 1
                        answer.partial_success.error_message = "no optimizers here"
                    else:
                        say(f"{span.trace_id.hex()} {span.name}")
            return answer

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request, context):  # noqa: N802
            for resource in request.resource_metrics:
                for metric in resource.scope_metrics[0].metrics:
                    say(f"metric {metric.name}")
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    say(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def serve_http(kind):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            self.rfile.read(int(self.headers["content-length"]))
            answer, content_type = b"<html><body>It works!</body></html>", "text/html"
            if kind == "echo":
                answer = str(self.headers).encode()
                say(self.headers.get("x-tenant"))
            if kind == "partial" and self.path == "/v1/traces":
                body = ExportTraceServiceResponse()
                body.partial_success.rejected_spans, body.partial_success.error_message = 2, "quota"
                answer, content_type = body.SerializeToString(), "application/x-protobuf"
            self.send_response(503 if kind == "error" else 200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    say(server.server_address[1])
    server.serve_forever()


def serve_silence():
    listener = socket.create_server(("127.0.0.1", 0))
    say(listener.getsockname()[1])
    held = []
    while True:
        held.append(listener.accept())


if __name__ == "__main__":
    kind = sys.argv[1]
    serve_grpc() if kind == "grpc" else serve_silence() if kind == "silent" else serve_http(kind)
