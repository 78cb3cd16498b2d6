"""Process groups, parameters, programs and the module around them, on one rank."""
