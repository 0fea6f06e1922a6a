"""What a planned step costs beside an eager one: the suite `offload`."""
