"""Queue, plan, step, deliver; the MQTT edge and the command line."""
