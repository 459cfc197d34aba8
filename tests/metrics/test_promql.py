from tests.metrics.promql import Matcher, asked


def test_metrics_matchers_and_labels_are_found_and_nothing_else():
    found = asked(
        'histogram_quantile(0.99, sum by (le) (rate(a_bucket{x=~"p|q, {r}", le="5.0"}[5m])))'
        " / ignoring (phase) group_left () sum without(kind) (b:c offset 1h) > bool 2 and on (job, instance) d or up"
    )
    assert found.metrics == {"a_bucket", "b:c", "d", "up"}
    assert found.matchers == [Matcher("a_bucket", "x", "=~", "p|q, {r}"), Matcher("a_bucket", "le", "=", "5.0")]
    assert found.labels == {"le", "phase", "kind", "job", "instance"}
