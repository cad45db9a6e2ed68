"""What the command line answers to some hundred configurations: recorded from two trees and compared."""
