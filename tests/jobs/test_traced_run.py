"""`jobs/traced_run.py` sends spans of public quantities alone, here by OpenTelemetry's own SDK."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from to_mlflow import NUMBERS
from traced_run import main, run_traced

from dpray.methods.dp_kps import release

MARKER = "Marlowe"
"""Every private text holds this word, and nothing else does."""

OF_ANY_RUN = {"dpray.method", "dpray.dataset", "dpray.exit_code"}
OF_A_RELEASE = {f"dpray.{name}" for name in NUMBERS}
OF_AN_ACTIVITY = {"dpray.completed", "dpray.total"}

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def traced(config: str) -> tuple[int, ReadableSpan, list[ReadableSpan]]:
    """Return the exit code, the run's span and those below it, after a search for the marker."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    code = run_traced([config], provider.get_tracer("dpray"))
    *activities, run = exporter.get_finished_spans()
    for span in (*activities, run):
        assert MARKER not in span.to_json()
        assert span.events == () and span.links == () and span.status.description is None
    assert run.parent is None
    assert {span.parent.span_id for span in activities if span.parent} == {run.context.span_id}
    return code, run, activities


def test_a_release_is_traced_in_the_numbers_of_its_report(dp_kps: str, tmp_path: Path) -> None:
    code, run, activities = traced(dp_kps)
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text())

    assert code == 0 and run.status.status_code == StatusCode.OK
    assert run.attributes is not None
    assert set(run.attributes) <= OF_ANY_RUN | OF_A_RELEASE
    found = {name.removeprefix("dpray."): value for name, value in run.attributes.items()}
    assert found.pop("method") == "dp_kps" and found.pop("dataset") == "notes"
    assert found.pop("exit_code") == 0
    assert found == {name: report[name] for name in found}
    assert {"epsilon", "delta", "records"} <= set(found)
    assert [span.name for span in activities] == [
        "planning", "hashing files", "charging the budget", "vocabulary", "densities",
        "writing the release",
    ]  # fmt: skip
    # What has no total, such as the reading of the records, has no count either.
    counted = {span.name: set(span.attributes or ()) for span in activities if span.attributes}
    assert counted == {"hashing files": OF_AN_ACTIVITY}


def test_the_page_lists_every_attribute() -> None:
    section = PAGE.read_text().partition("## Traces")[2].partition("\n\n**MLflow")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    listed = {f"dpray.{name}" for row in rows[1:] for name in re.findall(r"`(\w+)`", row)}
    assert listed == OF_ANY_RUN | OF_A_RELEASE | OF_AN_ACTIVITY


def test_an_error_is_traced_as_its_exit_code(
    dp_kps: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError(f"{MARKER} 17")

    with monkeypatch.context() as patch:
        patch.setattr(release, "total_counts", fails)
        code, run, activities = traced(dp_kps)
    assert code == 1 and run.status.status_code == StatusCode.ERROR
    assert set(run.attributes or ()) == OF_ANY_RUN
    assert (run.attributes or {})["dpray.exit_code"] == 1
    assert activities[-1].name == "vocabulary"
    assert MARKER not in "".join(capfd.readouterr())


def test_a_bad_configuration_is_no_run(dp_kps: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert run_traced([dp_kps, "method.recrods=3"], provider.get_tracer("dpray")) == 2
    assert exporter.get_finished_spans() == ()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a collector that keeps what it gets, by OTLP over HTTP."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_standard_variables_say_where_spans_go(
    dp_kps: str, collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "notes-team")
    assert main([dp_kps]) == 0
    assert got and MARKER.encode() not in b"".join(got)
    sent = [
        each for body in got for each in ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    resource = {
        pair.key: pair.value.string_value for each in sent for pair in each.resource.attributes
    }
    assert resource.pop("service.name") == "notes-team"
    assert all(name.startswith(("telemetry.sdk.", "service.instance.")) for name in resource)
    spans = [span for each in sent for scope in each.scope_spans for span in scope.spans]
    assert len({span.trace_id for span in spans}) == 1
    assert [span.name for span in spans][-2:] == ["writing the release", "dpray run"]
