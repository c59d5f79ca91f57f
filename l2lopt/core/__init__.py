"""What every other folder stands on: errors, layouts, settings, registries of names."""
