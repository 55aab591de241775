"""The words that training prompts are made of. What evaluation asks about is not among them."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


PEOPLE = _split("""
a young girl, an old fisherman, a clockmaker, a tired teacher, a shy boy, a brave knight, a
curious scientist, a retired pilot, two brothers, a group of friends, a travelling musician, a
baker, a lost tourist, a princess, a wizard, a farmer, a nurse, a detective, a thief, a young
painter, a robot, a librarian, a taxi driver, an astronaut, a blind poet, a soldier, a gardener, a
mail carrier, a cook, a carpenter, a shepherd, a ghost, a queen, a merchant, a student, a
grandmother, an orphan, a dancer, a sailor, a hunter, a monk, a photographer, a journalist, a
mechanic, a chess player, a swimmer, a mountain guide, a magician, a blacksmith, a weaver, a
doctor, a judge, a fox, a lonely dragon, a talking cat, an elephant, a small sparrow, a wolf, a
stray dog, a turtle, a bear cub, an owl, a family of mice, a giant, a mermaid, a mayor, a
stranger, a tailor, a potter, a violinist, a street vendor, a firefighter, a truck driver, a
beekeeper, a glassblower, a cartographer, a spy
""")
PLACES = _split("""
in a small village, by the sea, in a big city, in a dark forest, on a mountain, in the desert, on
a spaceship, in an old castle, on an island, in a library, at a train station, on a farm, in a
museum, under the ocean, in a snowy town, at a school, in a hospital, on a river boat, in a hidden
valley, in an abandoned factory, at the edge of the world, in a market, in a theater, in a cave,
on the moon, at a bus stop, in a swamp, in a kingdom far away, in a bakery, on a long bridge, in a
tower, in a garden, at a summer camp, in a hotel, on a frozen lake, in the jungle, in a mine, in a
monastery, at an airport, in a vineyard, in a fishing port, in an attic, on a night train, in a
toy shop, at a circus, in a desert town, in an orchard, at a wedding, on a rooftop, in a tunnel
""")
THINGS = _split("""
a lost key, a golden ring, a mysterious letter, an old map, a broken watch, a magic stone, a
secret door, a strange dream, a forgotten song, a silver coin, a hidden treasure, a promise, a
storm, a red balloon, a mirror, a book with empty pages, a wooden box, an unexpected gift, a race,
a great flood, a long winter, a new friendship, a mistake, a painting, a paper boat, a bell, a
candle, a feather, a violin, a mask, a shadow, a small seed, a photograph, a lie, a broken bridge,
a blue door, a compass, a flying machine, a wish, a stolen crown, a journey home, a missing child,
a birthday, a puzzle, a feast, a tree that never sleeps, an old radio, a fire, a voice in the
dark, a suitcase, a pair of shoes, a well, a sword, a telescope, a message in a bottle, a snow
globe, an apple, a locked room, a kite, a piano, a bicycle, a garden wall, a contest, a rumor, a
riddle
""")
GENRES = _split("""
funny, sad, scary, short, mysterious, romantic, exciting, strange, heartwarming, fantasy, science
fiction, adventure, historical, detective, bedtime, magical, thoughtful, dramatic, simple, hopeful
""")
THEMES = _split("""
courage, friendship, kindness, honesty, patience, loss, hope, forgiveness, greed, jealousy, trust,
growing up, family, loneliness, wisdom, sharing, fear, love, freedom, change, home, memory, luck,
pride, justice, curiosity, hard work, gratitude, loyalty, betrayal, dreams, time
""")
NAMES = _split("""
Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Isla, Jack, Kate, Leo, Mia, Noah, Olivia,
Peter, Quinn, Rosa, Sam, Tara, Umar, Vera, Will, Xenia, Yusuf, Zoe, Alex, Beth, Carlos, Diana,
Elena, Frank, Maria, Nina, Omar, Priya, Ravi, Sofia, Tom, Julia, Lucy, Max, Ivan, Hana, Ali, Chen,
Yuki, Lars
""")

TOPICS = _split("""
photosynthesis, gravity, the water cycle, electricity, magnets, atoms, molecules, the periodic
table, black holes, the solar system, the moon, stars, comets, volcanoes, earthquakes, plate
tectonics, weather, clouds, hurricanes, rainbows, climate change, the greenhouse effect,
evolution, DNA, genes, cells, bacteria, viruses, vaccines, the immune system, the heart, the
brain, the lungs, digestion, sleep, dreams, memory, the nervous system, vitamins, proteins,
carbohydrates, muscles, bones, blood, ecosystems, food chains, coral reefs, rainforests, deserts,
oceans, rivers, glaciers, caves, soil, whales, dolphins, sharks, elephants, lions, penguins,
eagles, butterflies, ants, spiders, snakes, frogs, horses, cats, dogs, dinosaurs, fossils, trees,
flowers, mushrooms, seeds, pollination, the Roman Empire, ancient Egypt, ancient Greece, the
Middle Ages, the Renaissance, the French Revolution, the Industrial Revolution, World War I, World
War II, the Cold War, the Silk Road, the Great Wall of China, the Vikings, the Aztecs, the Inca
Empire, the printing press, the steam engine, the telephone, the internet, computers, the light
bulb, airplanes, cars, trains, bicycles, ships, democracy, monarchy, constitutions, elections,
human rights, the United Nations, taxes, inflation, supply and demand, interest rates, banks, the
stock market, insurance, budgets, trade, money, machine learning, neural networks, artificial
intelligence, databases, operating systems, compilers, encryption, passwords, web browsers, search
engines, cloud computing, algorithms, data structures, recursion, version control, the binary
system, programming languages, robots, sensors, batteries, solar panels, wind turbines, nuclear
power, lasers, radio waves, sound, light, color, heat, friction, energy, force, momentum,
pressure, density, acids and bases, chemical reactions, crystals, metals, plastics, glass, paper,
concrete, algebra, geometry, calculus, probability, statistics, fractions, percentages, prime
numbers, the Pythagorean theorem, graphs, logic, sets, matrices, vectors, music theory, rhythm,
the piano, the guitar, opera, jazz, painting, sculpture, photography, film, poetry, novels, drama,
metaphors, grammar, punctuation, adjectives, essays, public speaking, debate, philosophy, ethics,
psychology, sociology, anthropology, economics, law, medicine, architecture, meditation, yoga,
exercise, nutrition, stress, happiness, motivation, leadership, teamwork, marketing, advertising,
customer service, project management, entrepreneurship, recycling, pollution, water conservation,
renewable energy, biodiversity, agriculture, fishing, forestry, mining, tourism, football,
basketball, tennis, swimming, running, chess, the Olympic Games, cooking, baking, bread, cheese,
chocolate, tea, coffee, rice, pasta, spices, salt, sugar, honey, olive oil, wine, gardening, bees,
chickens, cows, sheep, camels, kangaroos, pandas, bats, wolves, bears, octopuses, jellyfish,
tides, waves, wind, snow, fog, lightning, the atmosphere, the ozone layer, seasons, time zones,
maps, compasses, satellites, telescopes, microscopes, rockets, space stations, Mars, Jupiter,
Venus, Isaac Newton, Albert Einstein, Marie Curie, Charles Darwin, Leonardo da Vinci, Galileo,
Shakespeare, Mozart, Beethoven, Cleopatra, Julius Caesar, Napoleon, Abraham Lincoln, Mahatma
Gandhi, Nelson Mandela, Paris, London, New York, Tokyo, Rome, Cairo, Sydney, Brazil, India, China,
Japan, Canada, Mexico, Kenya, Italy, Spain, Germany, Egypt, Greece, Russia, the Amazon River,
Mount Everest, the Sahara
""")
TASKS = _split("""
bake bread, cook rice, make pancakes, plant a tree, grow tomatoes, clean a kitchen, paint a wall,
fix a flat tire, change a light bulb, write a resume, prepare for a job interview, learn a new
language, play the guitar, draw a face, take better photos, train a dog, care for a cat, save
money, plan a trip, pack a suitcase, organize a closet, study for an exam, take notes, give a
speech, make new friends, apologize to a friend, start a business, build a website, choose a
laptop, back up files, create a strong password, install a printer, sharpen a knife, iron a shirt,
remove a stain, wash a car, start a garden, make compost, keep bees, go camping, start a fire,
read a map, tie a tie, sew a button, knit a scarf, brew coffee, make tea, roast a chicken, cook
pasta, bake a cake, make soup, make a salad, boil an egg, lose weight, build muscle, run a
marathon, learn to swim, ride a bicycle, drive in snow, buy a house, rent an apartment, write a
letter, write a poem, write an essay, write a song, write a thank you note, write a cover letter,
plan a birthday party, plan a wedding, raise chickens, fall asleep faster, wake up early, reduce
stress, stop procrastinating, manage time, set goals, stay focused, be more confident, negotiate a
salary, solve a conflict, lead a team, run a meeting, teach a child to read, help with homework,
choose a college, learn mathematics, learn to code, debug a program, test software, design a logo,
edit a video, record a podcast, sell things online, invest in stocks, pay off debt, make a budget,
protect the environment, save water, save electricity, recycle plastic, repair a chair, build a
bookshelf, hang a picture, unclog a drain,
""")
LISTS = _split("""
fruits, vegetables, animals, countries, cities, rivers, mountains, sports, hobbies, jobs, colors,
musical instruments, books, movies, board games, healthy snacks, breakfast ideas, desserts, soups,
gift ideas, birthday party ideas, vacation ideas, weekend activities, outdoor activities, indoor
games, science experiments, business ideas, blog post titles, story ideas, essay topics, interview
questions, study tips, sleep tips, travel tips, cooking tips, cleaning tips, safety rules, good
habits, bad habits, morning routines, exercises, stretches, programming languages, data
structures, computer parts, apps, websites, inventions, famous scientists, famous painters, famous
writers, historical events, languages, currencies, planets, chemical elements, trees, flowers,
birds, fish, insects, reptiles, dog breeds, spices, herbs, drinks, kitchen tools, garden tools,
pieces of furniture, clothes, school subjects, emotions, adjectives, verbs, synonyms for happy,
synonyms for big, rhymes for day, ways to save money, ways to relax, ways to help others, ways to
stay healthy, ways to learn faster, ways to reduce waste, reasons to read, reasons to travel,
benefits of walking, benefits of reading, benefits of music, benefits of friendship, benefits of
exercise
""")
JOBS = _split("""
children, beginners, students, parents, teachers, office workers, travelers, older people,
athletes, small companies, farmers, programmers, a ten year old, a busy family, a school project,
a newsletter
""")
LANGUAGES = _split(
    "Python, Python, Python, Python, JavaScript, JavaScript, Java, C, C++, Go, Rust, SQL, "
    "TypeScript, Ruby, PHP, C#, Kotlin, Swift, Bash"
)
CODE_TASKS = _split("""
reverses a string, checks whether a number is prime, computes the factorial of a number, finds the
largest number in a list, sorts a list of numbers, counts the vowels in a string, removes
duplicates from a list, merges two sorted lists, computes the Fibonacci numbers, finds the
greatest common divisor, checks for balanced parentheses, performs a binary search, implements a
stack, implements a queue, implements a linked list, traverses a binary tree, reads a file line by
line, writes data to a file, parses a date, converts Celsius to Fahrenheit, computes the average
of a list, finds the median, counts the words in a text, finds the longest word, checks whether a
year is a leap year, generates a random password, validates an email address, downloads a web
page, parses JSON, sorts dictionaries by value, groups items by key, flattens a nested list,
transposes a matrix, multiplies two matrices, finds the shortest path in a graph, does a depth
first search, does a breadth first search, solves the towers of Hanoi, prints a multiplication
table, plays a guessing game, simulates a dice roll, shuffles a deck of cards, computes compound
interest, converts a number to binary, converts binary to decimal, converts Roman numerals, finds
common elements of two lists, splits a list into chunks, rotates an array, finds a missing number,
finds two numbers with a given sum, computes the sum of digits, reverses the digits of a number,
checks whether a number is even, swaps two variables, finds the second largest number, implements
bubble sort, implements quick sort, implements merge sort, implements insertion sort, implements a
hash table, implements a priority queue, caches results, measures the time of a function, retries
a failing call, logs messages, sends a request to an API, creates a class for a bank account,
creates a class for a student, creates a class for a rectangle, creates a class for a car, creates
a class for a shopping cart, creates a simple calculator, creates a to-do list, creates a timer,
creates a web server, connects to a database, inserts a row into a table, counts lines in a file,
copies a directory, renames files, finds large files, capitalizes each word, removes spaces from a
string, replaces words in a text, encrypts text with the Caesar cipher, computes the distance
between two points, computes the area of a circle, solves a quadratic equation, computes the power
of a number, computes the square root, rounds numbers, formats a price, prints a triangle of
stars, prints a pyramid, draws a chess board, finds all permutations, finds all subsets, finds the
longest common prefix, finds the longest increasing sequence, counts character frequencies, finds
the first unique character, adds two numbers, multiplies the items of a list, filters even
numbers, maps a function over a list, zips two lists, compares two strings, finds a substring,
joins strings, trims a string, generates prime numbers up to n, checks whether two words rhyme
""")
CONCEPTS = _split("""
variables, loops, functions, classes, inheritance, recursion, lists, dictionaries, exceptions,
modules, threads, pointers, arrays, strings, sorting, searching, hash tables, interfaces,
generics, closures, iterators, generators, decorators, lambda functions, file handling, regular
expressions, unit tests, debugging, comments, constants, conditions, switch statements, while
loops, enums, sets, tuples, memory management, garbage collection, asynchronous code, callbacks,
promises, operators, type conversion, scope, arguments, return values, object oriented
programming, joins, transactions
""")
OBJECTS = _split("""
apples, books, pencils, marbles, cookies, tickets, stamps, coins, bottles, chairs, oranges,
flowers, stickers, eggs, boxes, balloons, cards, shirts, candles, toys, plates, bricks, shells,
buttons
""")
SUBJECTS = _split("""
the manager, my sister, the old dog, our teacher, the company, the children, a young man, the
team, the students, my neighbor, the doctor, the train, the new restaurant, the city, the
committee, the weather, the author, a group of tourists, the machine, the government, her brother,
the customers
""")
VERBS = _split("""
finished the report late, went to the market, could not find the answer, decided to leave early,
was very happy about the news, did not like the idea, walked slowly through the park, made a big
mistake, bought a new car, needed more time, wanted to learn more, waited for the bus, gave a long
speech, lost the game, found an old letter, opened a small shop, changed the plan, forgot the
meeting, helped an old woman, won the first prize, asked a difficult question, built a new bridge
""")
ENDINGS = _split("""
because it was raining, in the morning, after the meeting, before anyone noticed, last summer,
with great care, for the first time, even though it was late, on a cold day, without saying a
word, despite the problems, as soon as possible, at the end of the week, when the sun went down
""")
