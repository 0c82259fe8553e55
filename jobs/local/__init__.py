"""The services of one machine: an embedded Valkey and the processes beside it, started, watched and ended together."""
