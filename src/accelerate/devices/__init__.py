"""What each kind of hardware is called and can do: the only place that names vendors."""
