"""The host's own module, which only shares its name with a folder of drumline."""

OWNER = "the host"
