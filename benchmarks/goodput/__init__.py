"""What the simulator says beside the tables that Decoupled DiLoCo states."""
