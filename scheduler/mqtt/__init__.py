"""The MQTT edge: jobs in, states, chunks and results out. The gateway talks to any `Engine`."""
