import unittest

from greeting import greet


class GreetingTest(unittest.TestCase):
    def test_greets_by_name(self) -> None:
        self.assertEqual(greet("Ada"), "Hello, Ada!")

    def test_ignores_surrounding_space(self) -> None:
        self.assertEqual(greet("  Ada "), "Hello, Ada!")

    def test_needs_a_name(self) -> None:
        with self.assertRaises(ValueError):
            greet(" ")


if __name__ == "__main__":
    unittest.main()
