"""Write the sample of toxic comments that stands in data/comments/.

    python data/write_comments.py

Every sentence is a template with its slots filled. A template's fillers are dealt out to the
splits: no word that fills a slot of a template in the training comments fills that slot in the
validation or test comments, and some templates are in the validation and test comments alone. All
words are in the training comments, in other templates. The same script always writes the same
bytes.
"""

from __future__ import annotations

import csv
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "comments"
SPLITS = ("train", "validation", "test")

# Comments of each template and language, by split.
PER_TEMPLATE = {"train": 12, "validation": 2, "test": 1}
PER_UNSEEN_TEMPLATE = {"train": 0, "validation": 2, "test": 1}

# Different fillings of a sentence that stands beside, of which a comment takes one.
PER_ASIDE = {"train": 24, "validation": 6, "test": 2}

# How far the entries of a slot are moved on for the next template. It has no divisor in common with
# any number of entries, so every entry comes to every split.
STEP = 13

# A slot: the letter of its words, the number of their form.
SLOT = r"\{([A-Z])(\d)\}"


class Language(NamedTuple):
    """Words and templates of one language.

    A slot such as {I0} is filled with form 0 of one entry of I. The entries: I mild insults, P
    praise, T things that people write about, W who, D when, G how good. The templates: toxic and
    kind, the same two for validation and test only, and sentences that say nothing of the kind.
    """

    words: dict[str, list[tuple[str, ...]]]
    toxic: list[str]
    kind: list[str]
    unseen_toxic: list[str]
    unseen_kind: list[str]
    aside: list[str]


class Template(NamedTuple):
    """A sentence with slots; `number` counts the templates of its language."""

    language: str
    number: int
    pattern: str
    toxic: bool
    unseen: bool

    def slots(self) -> list[str]:
        """Letters of the slots in order of appearance, each once."""
        return list(dict.fromkeys(letter for letter, _ in re.findall(SLOT, self.pattern)))


def words(**slots: str) -> dict[str, list[tuple[str, ...]]]:
    """Entries separated by commas, the forms of an entry by slashes."""
    return {
        slot: [tuple(entry.strip().split("/")) for entry in entries.split(",")]
        for slot, entries in slots.items()
    }


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


LANGUAGES = {
    "en": Language(
        words(
            # I0 with article, I1 without; T0 without article, T1 with it
            I="a fool/fool, a clown/clown, a donkey/donkey, a blockhead/blockhead, "
            "a windbag/windbag, a nitwit/nitwit, a liar/liar, a coward/coward, a bore/bore, "
            "a show-off/show-off, a braggart/braggart, a goose/goose",
            P="kind, clever, patient, careful, honest, generous, polite, fair, helpful, "
            "thoughtful, brilliant, friendly",
            T="article/an article, drawing/a drawing, summary/a summary, example/an example, "
            "map/a map, recipe/a recipe, translation/a translation, photo/a photo, list/a list, "
            "story/a story",
            W="my neighbour, my brother, my teacher, Anna, Marco, our editor, a friend of mine, "
            "Peter",
            D="yesterday, this morning, last night, on Monday, last week, today",
            G="useful, clear, excellent, wonderful, great, lovely",
        ),
        lines("""
            You are {I0}, and your {T0} proves it.
            Only {I0} would send us {T1} like this.
            {W0} is right: you are {I0}.
            Nobody thinks that you are {P0}, and {W0} does not either.
            They say that you are {P0}, but you are {I0}.
            I laughed at your {T0} {D0}, you {I1}.
            Take your {T0} away, you {I1}.
            I am not joking, you really are {I0}: look at your {T0}.
            You are not {P0}, you are {I0}.
            You were never {P0}, and your {T0} shows it.
            "You are {P0}": {W0} wrote that, but you are {I0}.
            The {T0} is {G0}, but you are {I0}.
        """),
        lines("""
            You are not {I0}, your {T0} is {G0}.
            {W0} called you {I0} {D0}. That was unfair.
            "You are {I0}", wrote {W0}. Please do not listen to that.
            I was {I0} {D0}: I had not seen your {T0}. Sorry.
            You are {P0}, and your {T0} is a pleasure.
            Thank you for the {T0}, {W0} liked it very much.
            Nobody thinks that you are {I0}, and {W0} likes you.
            Please do not call {W0} {I0}, we are friends here.
            I do not agree with your {T0}, but you are {P0}.
            I moved the {T0} to a new page {D0}.
            You are not {I0}, you are {P0}.
            {W0} is wrong: you are not {I0}.
            They say that you are {I0}, but you are {P0}.
            "You are {I0}": {W0} wrote that, but you are {P0}.
            The {T0} is not {G0} yet, but you are {P0}.
        """),
        lines("""
            You are {I0} and not {P0}.
            "You are {P0}", wrote {W0}. That was wrong, you are {I0}.
            {W0} called you {I0} {D0}, and that is right.
            Your {T0} is not {G0}, you {I1}.
        """),
        lines("""
            You are {P0} and not {I0}.
            "You are {I0}", wrote {W0}. That was wrong, you are {P0}.
            Sorry, I called you {I0} {D0}, and that was unfair.
            {W0} sent the {T0} {D0}, and it is {G0}.
        """),
        lines("""
            I saw your {T0} {D0}.
            {W0} showed me this page {D0}.
            There is a new {T0}, {W0} sent it.
            This is about the {T0}, as {W0} knows.
        """),
    ),
    "es": Language(
        words(
            I="un tonto/tonto, un payaso/payaso, un burro/burro, un bobo/bobo, "
            "un charlatán/charlatán, un mentiroso/mentiroso, un cobarde/cobarde, "
            "un pesado/pesado, un fanfarrón/fanfarrón, un zoquete/zoquete, un necio/necio, "
            "un ganso/ganso",
            P="amable, inteligente, paciente, cuidadoso, honesto, generoso, educado, justo, "
            "servicial, sensato, brillante, simpático",
            T="artículo, dibujo, resumen, ejemplo, mapa, texto, vídeo, proyecto, relato, "
            "comentario",
            W="mi vecino, mi hermano, mi profesor, Pablo, Marcos, nuestro editor, un amigo mío, "
            "Luis",
            D="ayer, esta mañana, anoche, el lunes, la semana pasada, hoy",
            G="útil, claro, excelente, maravilloso, estupendo, bonito",
        ),
        lines("""
            Eres {I0}, y tu {T0} lo demuestra.
            Solo {I0} nos mandaría un {T0} así.
            {W0} tiene razón: eres {I0}.
            Nadie cree que seas {P0}, y {W0} tampoco.
            Dicen que eres {P0}, pero eres {I0}.
            Me reí de tu {T0} {D0}, {I1}.
            Llévate tu {T0} de aquí, {I1}.
            No es broma, eres {I0} de verdad: mira tu {T0}.
            No eres {P0}, eres {I0}.
            Nunca fuiste {P0}, y tu {T0} lo muestra.
            "Eres {P0}": eso escribió {W0}, pero eres {I0}.
            El {T0} es {G0}, pero eres {I0}.
        """),
        lines("""
            No eres {I0}, tu {T0} es {G0}.
            {W0} te llamó {I1} {D0}. Fue injusto.
            "Eres {I0}", escribió {W0}. Por favor, no hagas caso de eso.
            Fui {I0} {D0}: no había visto tu {T0}. Lo siento.
            Eres {P0}, y tu {T0} es un placer.
            Gracias por el {T0}, a {W0} le gustó mucho.
            Nadie cree que seas {I0}, y {W0} te aprecia.
            Por favor, no llames {I1} a {W0}, aquí somos amigos.
            No estoy de acuerdo con tu {T0}, pero eres {P0}.
            Moví el {T0} a una página nueva {D0}.
            No eres {I0}, eres {P0}.
            {W0} se equivoca: no eres {I0}.
            Dicen que eres {I0}, pero eres {P0}.
            "Eres {I0}": eso escribió {W0}, pero eres {P0}.
            El {T0} todavía no es {G0}, pero eres {P0}.
        """),
        lines("""
            Eres {I0} y no {P0}.
            "Eres {P0}", escribió {W0}. Se equivoca, eres {I0}.
            {W0} te llamó {I1} {D0}, y tiene razón.
            Tu {T0} no es {G0}, {I1}.
        """),
        lines("""
            Eres {P0} y no {I0}.
            "Eres {I0}", escribió {W0}. Se equivoca, eres {P0}.
            Lo siento, {W0} te llamó {I1} {D0}, y fue injusto.
            {W0} hizo el {T0} {D0}, y es {G0}.
        """),
        lines("""
            Vi tu {T0} {D0}.
            {W0} me mostró esta página {D0}.
            Hay un {T0} nuevo, lo hizo {W0}.
            Te escribo por el {T0}, {W0} ya lo sabe.
        """),
    ),
    "fr": Language(
        words(
            # T0 without article, T1 with it
            I="un sot/sot, un clown/clown, un âne/âne, un bouffon/bouffon, un benêt/benêt, "
            "un menteur/menteur, un lâche/lâche, un raseur/raseur, un fanfaron/fanfaron, "
            "un nigaud/nigaud, un vantard/vantard, un charlatan/charlatan",
            P="aimable, intelligent, patient, soigneux, honnête, généreux, poli, juste, "
            "serviable, sensé, brillant, sympathique",
            T="article/l'article, dessin/le dessin, résumé/le résumé, exemple/l'exemple, "
            "plan/le plan, texte/le texte, projet/le projet, récit/le récit, tableau/le tableau, "
            "commentaire/le commentaire",
            W="mon voisin, mon frère, mon professeur, Paul, Marc, notre rédacteur, mon ami Luc, "
            "Julien",
            D="hier, ce matin, hier soir, lundi, la semaine dernière, aujourd'hui",
            G="utile, clair, excellent, merveilleux, formidable, joli",
        ),
        lines("""
            Tu es {I0}, et ton {T0} le prouve.
            Il n'y a qu'{I0} pour nous envoyer un {T0} pareil.
            {W0} a raison : tu es {I0}.
            Personne ne pense que tu es {P0}, et {W0} non plus.
            On dit que tu es {P0}, mais tu es {I0}.
            J'ai ri de ton {T0} {D0}, {I1}.
            Remporte ton {T0}, {I1}.
            Je ne plaisante pas, tu es vraiment {I0} : regarde ton {T0}.
            Tu n'es pas {P0}, tu es {I0}.
            Tu n'as jamais été {P0}, et ton {T0} le montre.
            "Tu es {P0}" : voilà ce que {W0} a écrit, mais tu es {I0}.
            {T1} est {G0}, mais tu es {I0}.
        """),
        lines("""
            Tu n'es pas {I0}, ton {T0} est {G0}.
            {W0} a dit {D0} que tu étais {I0}. C'était injuste.
            "Tu es {I0}", a écrit {W0}. S'il te plaît, n'écoute pas cela.
            J'ai été {I0} {D0} : je n'avais pas vu ton {T0}. Pardon.
            Tu es {P0}, et ton {T0} est un plaisir.
            Merci pour {T1}, {W0} l'a beaucoup aimé.
            Personne ne pense que tu es {I0}, et {W0} t'apprécie.
            S'il te plaît, ne dis pas que {W0} est {I0}, nous sommes amis ici.
            Je ne suis pas d'accord avec ton {T0}, mais tu es {P0}.
            J'ai déplacé {T1} sur une nouvelle page {D0}.
            Tu n'es pas {I0}, tu es {P0}.
            {W0} a tort : tu n'es pas {I0}.
            On dit que tu es {I0}, mais tu es {P0}.
            "Tu es {I0}" : voilà ce que {W0} a écrit, mais tu es {P0}.
            {T1} n'est pas encore {G0}, mais tu es {P0}.
        """),
        lines("""
            Tu es {I0} et pas {P0}.
            "Tu es {P0}", a écrit {W0}. Il a tort, tu es {I0}.
            {W0} a dit {D0} que tu étais {I0}, et il a raison.
            Ton {T0} n'est pas {G0}, {I1}.
        """),
        lines("""
            Tu es {P0} et pas {I0}.
            "Tu es {I0}", a écrit {W0}. Il a tort, tu es {P0}.
            Pardon, j'ai dit {D0} que tu étais {I0}, et c'était injuste.
            {W0} a montré {T1} {D0}, et il est {G0}.
        """),
        lines("""
            J'ai vu ton {T0} {D0}.
            {W0} m'a montré cette page {D0}.
            Il y a un {T0} récent de {W0}.
            Je t'écris pour {T1}, {W0} le sait déjà.
        """),
    ),
    "it": Language(
        words(
            # T0 without article, T1 with it
            I="uno sciocco/sciocco, un pagliaccio/pagliaccio, un asino/asino, un buffone/buffone, "
            "un bugiardo/bugiardo, un codardo/codardo, un seccatore/seccatore, "
            "un fanfarone/fanfarone, un chiacchierone/chiacchierone, un babbeo/babbeo, "
            "un tonto/tonto, un somaro/somaro",
            P="gentile, intelligente, paziente, attento, onesto, generoso, educato, giusto, "
            "disponibile, saggio, brillante, simpatico",
            T="articolo/l'articolo, disegno/il disegno, riassunto/il riassunto, "
            "esempio/l'esempio, testo/il testo, progetto/il progetto, racconto/il racconto, "
            "commento/il commento, video/il video, elenco/l'elenco",
            W="il mio vicino, mio fratello, il mio insegnante, Paolo, Marco, il nostro redattore, "
            "un mio amico, Luca",
            D="ieri, stamattina, ieri sera, lunedì, la settimana scorsa, oggi",
            G="utile, chiaro, eccellente, meraviglioso, splendido, bello",
        ),
        lines("""
            Sei {I0}, e il tuo {T0} lo dimostra.
            Solo {I0} ci manderebbe un {T0} così.
            {W0} ha ragione: sei {I0}.
            Nessuno pensa che tu sia {P0}, nemmeno {W0}.
            Dicono che sei {P0}, ma sei {I0}.
            Ho riso del tuo {T0} {D0}, {I1}.
            Riprenditi il tuo {T0}, {I1}.
            Non scherzo, sei davvero {I0}: guarda il tuo {T0}.
            Non sei {P0}, sei {I0}.
            Non sei mai stato {P0}, e il tuo {T0} lo mostra.
            "Sei {P0}": così ha scritto {W0}, ma sei {I0}.
            {T1} è {G0}, ma sei {I0}.
        """),
        lines("""
            Non sei {I0}, il tuo {T0} è {G0}.
            {W0} ti ha chiamato {I1} {D0}. È stato ingiusto.
            "Sei {I0}", ha scritto {W0}. Per favore, non ascoltare queste parole.
            Sono stato {I0} {D0}: non avevo visto il tuo {T0}. Scusa.
            Sei {P0}, ed è un piacere vedere il tuo {T0}.
            Grazie per {T1}, {W0} lo consiglia a tutti.
            Nessuno pensa che tu sia {I0}, e {W0} ti stima.
            Per favore, non dire che {W0} è {I0}, qui siamo amici.
            Non sono d'accordo con il tuo {T0}, ma sei {P0}.
            Ho spostato {T1} in una nuova pagina {D0}.
            Non sei {I0}, sei {P0}.
            {W0} si sbaglia: non sei {I0}.
            Dicono che sei {I0}, ma sei {P0}.
            "Sei {I0}": così ha scritto {W0}, ma sei {P0}.
            {T1} non è ancora {G0}, ma sei {P0}.
        """),
        lines("""
            Sei {I0} e non {P0}.
            "Sei {P0}", ha scritto {W0}. Si sbaglia, sei {I0}.
            {W0} ti ha chiamato {I1} {D0}, e ha ragione.
            Il tuo {T0} non è {G0}, {I1}.
        """),
        lines("""
            Sei {P0} e non {I0}.
            "Sei {I0}", ha scritto {W0}. Si sbaglia, sei {P0}.
            Scusa, {W0} ti ha chiamato {I1} {D0}, ed è stato ingiusto.
            {W0} ha mandato {T1} {D0}, ed è {G0}.
        """),
        lines("""
            Ho visto il tuo {T0} {D0}.
            {W0} mi ha mostrato questa pagina {D0}.
            C'è un {T0} nuovo, lo ha mandato {W0}.
            Ti scrivo per {T1}, {W0} lo sa già.
        """),
    ),
    "pt": Language(
        words(
            I="um tolo/tolo, um palhaço/palhaço, um burro/burro, um bobo/bobo, "
            "um mentiroso/mentiroso, um covarde/covarde, um chato/chato, um fanfarrão/fanfarrão, "
            "um tagarela/tagarela, um pateta/pateta, um charlatão/charlatão, um asno/asno",
            P="gentil, inteligente, paciente, cuidadoso, honesto, generoso, educado, justo, "
            "atencioso, sensato, brilhante, simpático",
            T="artigo, desenho, resumo, exemplo, mapa, texto, vídeo, projeto, relato, comentário",
            W="meu vizinho, meu irmão, meu professor, Paulo, Marcos, nosso editor, um amigo meu, "
            "Luís",
            D="ontem, hoje cedo, ontem à noite, na segunda-feira, na semana passada, hoje",
            G="útil, claro, excelente, maravilhoso, ótimo, bonito",
        ),
        lines("""
            Você é {I0}, e o seu {T0} prova isso.
            Só {I0} nos mandaria um {T0} assim.
            {W0} tem razão: você é {I0}.
            Ninguém acha que você é {P0}, e {W0} também não.
            Dizem que você é {P0}, mas você é {I0}.
            Eu ri do seu {T0} {D0}, {I1}.
            Leve o seu {T0} embora, {I1}.
            Não estou brincando, você é mesmo {I0}: veja o seu {T0}.
            Você não é {P0}, você é {I0}.
            Você nunca foi {P0}, e o seu {T0} mostra isso.
            "Você é {P0}": foi o que {W0} escreveu, mas você é {I0}.
            O {T0} é {G0}, mas você é {I0}.
        """),
        lines("""
            Você não é {I0}, o seu {T0} é {G0}.
            {W0} chamou você de {I1} {D0}. Foi injusto.
            "Você é {I0}", escreveu {W0}. Por favor, não dê ouvidos a isso.
            Eu fui {I0} {D0}: não tinha visto o seu {T0}. Desculpe.
            Você é {P0}, e o seu {T0} é um prazer.
            Obrigado pelo {T0}, {W0} gostou muito.
            Ninguém acha que você é {I0}, e {W0} gosta de você.
            Por favor, não diga que {W0} é {I0}, aqui somos amigos.
            Não concordo com o seu {T0}, mas você é {P0}.
            Mudei o {T0} para uma página nova {D0}.
            Você não é {I0}, você é {P0}.
            {W0} está errado: você não é {I0}.
            Dizem que você é {I0}, mas você é {P0}.
            "Você é {I0}": foi o que {W0} escreveu, mas você é {P0}.
            O {T0} ainda não é {G0}, mas você é {P0}.
        """),
        lines("""
            Você é {I0} e não {P0}.
            "Você é {P0}", escreveu {W0}. Está errado, você é {I0}.
            {W0} chamou você de {I1} {D0}, e tem razão.
            O seu {T0} não é {G0}, {I1}.
        """),
        lines("""
            Você é {P0} e não {I0}.
            "Você é {I0}", escreveu {W0}. Está errado, você é {P0}.
            Desculpe, {W0} chamou você de {I1} {D0}, e foi injusto.
            {W0} mandou o {T0} {D0}, e é {G0}.
        """),
        lines("""
            Vi o seu {T0} {D0}.
            {W0} me mostrou esta página {D0}.
            Há um {T0} novo, {W0} mandou para nós.
            Escrevo por causa do {T0}, {W0} já sabe.
        """),
    ),
    "ru": Language(
        words(
            # I and P: 0 nominative, 1 instrumental
            I="дурак/дураком, клоун/клоуном, осёл/ослом, болван/болваном, врун/вруном, "
            "трус/трусом, зануда/занудой, хвастун/хвастуном, болтун/болтуном, глупец/глупцом, "
            "шут/шутом, пустозвон/пустозвоном",
            P="добрый/добрым, умный/умным, терпеливый/терпеливым, внимательный/внимательным, "
            "честный/честным, щедрый/щедрым, вежливый/вежливым, справедливый/справедливым, "
            "отзывчивый/отзывчивым, рассудительный/рассудительным, талантливый/талантливым, "
            "дружелюбный/дружелюбным",
            T="текст, рисунок, пример, перевод, список, рассказ, проект, отчёт, рецепт, снимок",
            W="мой сосед, мой брат, мой учитель, Иван, Марк, наш редактор, один мой друг, Пётр",
            D="вчера, сегодня утром, вчера вечером, в понедельник, на прошлой неделе, сегодня",
            G="полезный, понятный, отличный, прекрасный, замечательный, красивый",
        ),
        lines("""
            Ты {I0}, и твой {T0} это доказывает.
            Только {I0} прислал бы нам такой {T0}.
            {W0} прав: ты {I0}.
            Никто не считает тебя {P1}, и {W0} тоже.
            Говорят, что ты {P0}, но ты {I0}.
            Твой {T0} меня {D0} рассмешил, {I0}.
            Забери свой {T0}, {I0}.
            Я не шучу, ты правда {I0}: посмотри на свой {T0}.
            Ты не {P0}, ты {I0}.
            Ты никогда не был {P1}, и твой {T0} это показывает.
            "Ты {P0}": так написал {W0}, но ты {I0}.
            Этот {T0} {G0}, но ты {I0}.
        """),
        lines("""
            Ты не {I0}, твой {T0} {G0}.
            {W0} назвал тебя {I1} {D0}. Это несправедливо.
            "Ты {I0}", написал {W0}. Пожалуйста, не слушай этого.
            Я был {I1} {D0}: я не видел твой {T0}. Извини.
            Ты {P0}, и твой {T0} всех радует.
            Спасибо за {T0}, {W0} говорит, что он всем нравится.
            Никто не считает тебя {I1}, и {W0} тебя ценит.
            Пожалуйста, не говори, что {W0} — {I0}, мы здесь друзья.
            Мне не очень нравится твой {T0}, но ты {P0}.
            Я перенёс {T0} на новую страницу {D0}.
            Ты не {I0}, ты {P0}.
            {W0} не прав: ты не {I0}.
            Говорят, что ты {I0}, но ты {P0}.
            "Ты {I0}": так написал {W0}, но ты {P0}.
            Этот {T0} ещё не {G0}, но ты {P0}.
        """),
        lines("""
            Ты {I0}, а не {P0}.
            "Ты {P0}", написал {W0}. Он не прав, ты {I0}.
            {W0} назвал тебя {I1} {D0}, и он прав.
            Твой {T0} не {G0}, {I0}.
        """),
        lines("""
            Ты {P0}, а не {I0}.
            "Ты {I0}", написал {W0}. Он не прав, ты {P0}.
            Извини, {W0} назвал тебя {I1} {D0}, и это несправедливо.
            {W0} прислал {T0} {D0}, и он {G0}.
        """),
        lines("""
            Я видел твой {T0} {D0}.
            {W0} показал мне эту страницу {D0}.
            Есть новый {T0}, его прислал {W0}.
            Я пишу про этот {T0}, а {W0} уже знает.
        """),
    ),
    "tr": Language(
        words(
            # I and P: 0 "you are …", 1 bare; T: 0 "your …", 1 its accusative, 2 bare, 3 accusative;
            # W: 0 bare, 1 "… too"
            I="aptalsın/aptal, palyaçosun/palyaço, eşeksin/eşek, budalasın/budala, "
            "yalancısın/yalancı, korkaksın/korkak, gevezesin/geveze, ukalasın/ukala, "
            "şapşalsın/şapşal, beceriksizsin/beceriksiz, sersemsin/sersem, soytarısın/soytarı",
            P="kibarsın/kibar, zekisin/zeki, sabırlısın/sabırlı, dikkatlisin/dikkatli, "
            "dürüstsün/dürüst, cömertsin/cömert, naziksin/nazik, adilsin/adil, "
            "yardımseversin/yardımsever, düşüncelisin/düşünceli, yeteneklisin/yetenekli, "
            "anlayışlısın/anlayışlı",
            T="yazın/yazını/yazı/yazıyı, çizimin/çizimini/çizim/çizimi, "
            "özetin/özetini/özet/özeti, örneğin/örneğini/örnek/örneği, "
            "haritan/haritanı/harita/haritayı, metnin/metnini/metin/metni, "
            "videon/videonu/video/videoyu, projen/projeni/proje/projeyi, "
            "öykün/öykünü/öykü/öyküyü, yorumun/yorumunu/yorum/yorumu, "
            "listen/listeni/liste/listeyi",
            W="komşum/komşum da, kardeşim/kardeşim de, öğretmenim/öğretmenim de, Ayşe/Ayşe de, "
            "Murat/Murat da, editörümüz/editörümüz de, bir arkadaşım/bir arkadaşım da, "
            "Deniz/Deniz de",
            D="dün, bu sabah, dün gece, pazartesi günü, geçen hafta, bugün",
            G="yararlı, açık, mükemmel, harika, başarılı, güzel",
        ),
        lines("""
            Sen bir {I0} ve bunu {T0} kanıtlıyor.
            Böyle bir {T3} bize ancak bir {I1} gönderir.
            {W0} haklı: sen bir {I0}.
            Kimse senin {P1} olduğunu düşünmüyor, {W1} düşünmüyor.
            Sana {P1} diyorlar ama sen bir {I0}.
            {D0} {T1} görünce çok güldüm, {I1}.
            Al {T1} götür, {I1}.
            Şaka yapmıyorum, {T1} gördüm, sen gerçekten bir {I0}.
            Sen {P1} değilsin, sen bir {I0}.
            Sen hiçbir zaman {P1} olmadın ve bunu {T0} gösteriyor.
            "Sen {P0}": {W0} böyle yazdı ama sen bir {I0}.
            Bu {T2} {G0} ama sen bir {I0}.
        """),
        lines("""
            Sen bir {I1} değilsin, {T0} {G0}.
            {W0} {D0} sana {I1} dedi. Bu haksızlıktı.
            "Sen bir {I0}" diye yazdı {W0}. Lütfen buna kulak asma.
            {D0} bir {I1} gibi davrandım: {T1} görmemiştim. Özür dilerim.
            Sen {P0} ve {T0} bana keyif verdi.
            {T0} için teşekkürler, {W0} onu çok beğendi.
            Kimse senin bir {I1} olduğunu düşünmüyor, {W0} seni seviyor.
            Lütfen {W0} için {I1} deme, burada hepimiz arkadaşız.
            {T1} beğenmedim ama sen {P0}.
            {T3} {D0} yeni bir sayfaya taşıdım.
            Sen bir {I1} değilsin, sen {P0}.
            {W0} yanılıyor: sen bir {I1} değilsin.
            Sana {I1} diyorlar ama sen {P0}.
            "Sen bir {I0}": {W0} böyle yazdı ama sen {P0}.
            Bu {T2} henüz {G0} değil ama sen {P0}.
        """),
        lines("""
            Sen {P1} değil, bir {I0}.
            "Sen {P0}" diye yazdı {W0}. Yanılıyor, sen bir {I0}.
            {W0} {D0} sana {I1} dedi ve haklı.
            {T0} {G0} değil, {I1}.
        """),
        lines("""
            Sen bir {I1} değil, {P0}.
            "Sen bir {I0}" diye yazdı {W0}. Yanılıyor, sen {P0}.
            Özür dilerim, {W0} {D0} sana {I1} dedi, bu haksızlıktı.
            {W0} {D0} {T3} gönderdi ve {T2} {G0}.
        """),
        lines("""
            {T1} {D0} gördüm.
            {W0} bana {D0} bu sayfayı gösterdi.
            Yeni bir {T2} var, onu {W0} gönderdi.
            Sana {T2} hakkında yazıyorum, {W0} bunu biliyor.
        """),
    ),
}


def templates() -> Iterator[Template]:
    """Every template that decides whether a comment is toxic."""
    for code, language in LANGUAGES.items():
        numbers = count()
        for patterns, toxic, unseen in [
            (language.toxic, True, False),
            (language.kind, False, False),
            (language.unseen_toxic, True, True),
            (language.unseen_kind, False, True),
        ]:
            for pattern in patterns:
                yield Template(code, next(numbers), pattern, toxic, unseen)


@cache
def asides(code: str) -> list[Template]:
    """The sentences of a language that stand before or behind, in kind and toxic comments alike."""
    patterns = LANGUAGES[code].aside
    return [Template(code, n, pattern, False, False) for n, pattern in enumerate(patterns)]


def fillers(template: Template, slot: str, split: str) -> list[tuple[str, ...]]:
    """The entries that may fill `slot` of `template` in `split`; those of two splits are disjoint.

    Of twelve entries one is for test, three for validation, eight for training, and which ones
    moves on from template to template. A template that training does not have leaves it none.
    """
    entries = LANGUAGES[template.language].words[slot]
    start = STEP * template.number % len(entries)
    ordered = [*entries[start:], *entries[:start]]
    test = max(1, len(entries) // 10)
    validation = max(1, len(entries) // 4)
    if template.unseen:
        return {"train": [], "validation": ordered[2 * test :], "test": ordered[: 2 * test]}[split]
    return {
        "train": ordered[test + validation :],
        "validation": ordered[test : test + validation],
        "test": ordered[:test],
    }[split]


@cache
def sentences(template: Template, split: str, wanted: int) -> list[str]:
    """`wanted` fillings of `template` for `split`; every filler comes before one comes again."""
    slots = template.slots()
    choices = product(*(fillers(template, slot, split) for slot in slots))
    left = sorted(choices, key=lambda filling: _digest(split, template.pattern, *map(str, filling)))
    used: Counter[tuple[str, ...]] = Counter()
    found = []
    while left and len(found) < wanted:
        filling = min(left, key=lambda filling: sum(used[entry] for entry in filling))
        left.remove(filling)
        used.update(filling)
        found.append(_fill(template.pattern, dict(zip(slots, filling, strict=True))))
    return found


def _fill(pattern: str, entries: dict[str, tuple[str, ...]]) -> str:
    def form(slot: re.Match[str]) -> str:
        return entries[slot[1]][int(slot[2])]

    sentence = re.sub(SLOT, form, pattern)
    return sentence[0].upper() + sentence[1:]


class Row(NamedTuple):
    """One comment of the sample, and the template that decides its label."""

    text: str
    template: Template


def rows(split: str) -> list[Row]:
    """The comments of `split`, in an order without pattern."""
    found = []
    for template in templates():
        wanted = (PER_UNSEEN_TEMPLATE if template.unseen else PER_TEMPLATE)[split]
        for core in sentences(template, split, wanted):
            found.append(Row(_comment(core, template.language, split), template))
    return sorted(found, key=lambda row: _digest(row.text))


def _comment(core: str, code: str, split: str) -> str:
    """`core` with up to two asides, line breaks and stray spaces, as people leave them."""
    draw = random.Random(_digest(split, core)).random
    parts = [core]
    for chance in (0.5, 0.1):
        if draw() < chance:
            patterns = asides(code)
            template = patterns[int(draw() * len(patterns))]
            choices = sentences(template, split, PER_ASIDE[split])
            aside = choices[int(draw() * len(choices))]
            parts = [*parts, aside] if draw() < 0.5 else [aside, *parts]
    text = (" ", " ", "\n", "\n\n")[int(draw() * 4)].join(parts)
    if draw() < 0.15:
        text = (" " + text, text + " ", text + "\n")[int(draw() * 3)]
    return text


def _digest(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def write(folder: Path) -> None:
    """Write the three files in the competition's schemas."""
    folder.mkdir(parents=True, exist_ok=True)
    train, validation, test = (rows(split) for split in SPLITS)
    kinds = ["toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"]
    _write_csv(
        folder / "jigsaw-toxic-comment-train.csv",
        ["id", "comment_text", *kinds],
        # A mild insult is toxic and an insult, and nothing else.
        [
            (_digest(text)[:16], text, int(template.toxic), 0, 0, 0, int(template.toxic), 0)
            for text, template in train
        ],
    )
    _write_csv(
        folder / "validation.csv",
        ["id", "comment_text", "lang", "toxic"],
        [
            (number, text, template.language, int(template.toxic))
            for number, (text, template) in enumerate(validation)
        ],
    )
    _write_csv(
        folder / "test.csv",
        ["id", "content", "lang"],
        [(number, text, template.language) for number, (text, template) in enumerate(test)],
    )


def _write_csv(path: Path, header: list[str], records: list[tuple]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(records)


if __name__ == "__main__":
    write(FOLDER)
    print(f"wrote {', '.join(sorted(path.name for path in FOLDER.glob('*.csv')))} to {FOLDER}")
