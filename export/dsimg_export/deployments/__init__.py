"""Templates of what `dsimg deploy` writes: a file NAME.template is filled in with `string.Template`."""
