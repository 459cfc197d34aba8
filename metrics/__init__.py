"""What a scheduler tells Prometheus: `instruments` counts, `exporter` serves the page. Imports nothing of ours."""
