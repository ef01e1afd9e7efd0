"""The metrics of a service, or of any app, for Prometheus."""

from bide.service.metrics.collected import Metrics
from bide.service.metrics.families import Family

__all__ = ["Family", "Metrics"]
