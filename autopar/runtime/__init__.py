"""What runs on a rank: process groups, parameters, programs, and the module around them."""
