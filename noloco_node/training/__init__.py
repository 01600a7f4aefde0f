"""The stage worker: one thread that owns the device, the stage and its optimizer."""
