"""The gateway has Prometheus metrics, whose labels hold none of a caller's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

Families = tuple[Metric, ...]
"""It holds the metrics of one gateway, with their samples."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """Counts and times requests. `route` is one of the gateway's own or "other"; `status` is an
    HTTP status: 499 where the caller disconnected, the error's for a broken stream."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "dpray_requests", "Requests answered.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "dpray_request_seconds",
            "Seconds from a request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "dpray_requests_in_flight", "Requests in flight.", registry=self._registry
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def families(self, in_flight: int) -> Families:
        self._in_flight.set(in_flight)
        return tuple(self._registry.collect())


class _Merged(Collector):
    def __init__(self, published: Mapping[str, Families]) -> None:
        self._published = published

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for gateway, families in self._published.items():
            for each in families:
                new = Metric(each.name, each.documentation, each.type)
                family = merged.setdefault(each.name, new)
                for name, labels, value, *_ in each.samples:
                    family.add_sample(name, {**labels, "gateway": gateway}, value)
        yield from merged.values()


def merged_page(published: Mapping[str, Families]) -> bytes:
    """Return one page with the metrics of all gateways.

    Their samples have the label `gateway`, and are not summed: a rate of a sum would be wrong when
    the counters of a gateway that died are missing from it.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(published))
    return generate_latest(registry)
