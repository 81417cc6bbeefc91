"""Where the experts of an EP group lie, and how few ranks can hold them. PURE: no clock, no sockets."""
