"""Files with learned optimisers: written, read, shared, and those that come with the package."""
