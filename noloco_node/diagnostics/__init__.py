"""What a person looks at: `doctor`, `status`, `top`, `watch`."""
