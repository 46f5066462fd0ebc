"""Run a configuration like `dpray run`, and send OpenTelemetry spans of public quantities alone.

    pip install opentelemetry-exporter-otlp-proto-http
    export OTEL_SERVICE_NAME=dpray OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318
    python jobs/traced_run.py jobs/private_prediction_cpu.yaml output.path=out/notes

One span is the run. Below it, each activity that the progress bar shows is a span. An error ends
the run's span with dpray's exit code and nothing else: no message, no row, no stack.
"""

from __future__ import annotations

import sys
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context
from to_mlflow import numbers

import dpray
from dpray.cli import interrupt_on_sigterm, show_error
from dpray.commands.run import show_run
from dpray.runs.privacy_report import parse_report
from dpray.terminal import Terminal


class Activities:
    """Turns a run's progress, which is public, into spans below the run's own."""

    def __init__(self, tracer: Tracer, run: Span) -> None:
        self._tracer, self._run = tracer, set_span_in_context(run)
        self._span: Span | None = None
        self._last = dpray.Progress("")

    def show(self, progress: dpray.Progress) -> None:
        if progress.is_warning:
            return
        if self._span is None or progress.activity != self._last.activity:
            self.end()
            self._span = self._tracer.start_span(progress.activity, self._run)
        self._last = progress

    def end(self) -> None:
        """End the span of the present activity."""
        if self._span is not None:
            if self._last.total is not None:
                parts = {"completed": self._last.completed, "total": self._last.total}
                self._span.set_attributes({f"dpray.{name}": n for name, n in parts.items()})
            self._span.end()
            self._span = None


def run_traced(arguments: list[str], tracer: Tracer) -> int:
    """Run a configuration, given with its overrides; return dpray's exit code."""
    try:
        config = dpray.load(*arguments)
    except Exception as error:
        return show_error(error)
    known = {"dpray.method": config.method.name, "dpray.dataset": config.privacy.dataset}
    run = tracer.start_span("dpray run", attributes=known)
    activities = Activities(tracer, run)
    code = 1
    try:
        made = dpray.run(config, activities.show)
        code = 0
        run.set_attributes({f"dpray.{name}": n for name, n in numbers(made.report).items()})
        show_run(parse_report(made.report), Path(config.output.path), Terminal())
    except (Exception, KeyboardInterrupt) as error:
        code = show_error(error)
    finally:
        activities.end()
        run.set_attribute("dpray.exit_code", code)
        run.set_status(StatusCode.ERROR if code else StatusCode.OK)
        run.end()
    return code


def main(arguments: list[str]) -> int:
    """Run and export as the standard environment variables say; return dpray's exit code."""
    if not arguments:
        print("usage: python jobs/traced_run.py CONFIG [KEY=VALUE ...]", file=sys.stderr)
        return 2
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        return run_traced(arguments, provider.get_tracer("dpray"))
    finally:
        provider.shutdown()


if __name__ == "__main__":
    interrupt_on_sigterm()
    sys.exit(main(sys.argv[1:]))
